#include "io/uring_reader.hpp"

#include <sys/eventfd.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <optional>
#include <stdexcept>
#include <system_error>
#include <utility>

namespace zipmoe {
namespace {

constexpr uint64_t kLargestBlockBytes = uint64_t{1} << 30;
constexpr uint32_t kLargestQueueDepth = 4096;
constexpr uint64_t kWakeToken = UINT64_MAX;

const UringReaderOptions& checked(const UringReaderOptions& options) {
  if (options.queue_depth == 0 || options.queue_depth > kLargestQueueDepth) {
    throw std::invalid_argument("the queue depth must be between 1 and 4096");
  }
  if (options.block_bytes > kLargestBlockBytes) throw std::invalid_argument("a block has at most 1 GiB");
  return options;
}

}  // namespace

UringReader::WakeEvent::WakeEvent() : descriptor_(::eventfd(0, EFD_CLOEXEC)) {
  if (descriptor_ < 0) {
    throw UringUnavailable("no descriptor is left for io_uring: " + std::generic_category().message(errno));
  }
}

UringReader::WakeEvent::~WakeEvent() { ::close(descriptor_); }

void UringReader::WakeEvent::signal() const noexcept {
  const uint64_t one = 1;
  while (::write(descriptor_, &one, sizeof one) < 0 && errno == EINTR) {
  }
}

UringReader::UringReader(const std::vector<std::string>& paths, const UringReaderOptions& options)
    : options_(checked(options)),
      files_(paths, options.mode),
      queue_(static_cast<uint32_t>(paths.size()), options.block_bytes, options.queue_capacity,
             options.least_block_bytes),
      completion_threads_(options.completion_threads, [this](const ArrivedChunk& arrived) { finish(arrived); }),
      under_way_(options.queue_depth) {
  for (uint32_t token = 0; token < options.queue_depth; ++token) free_tokens_.push_back(token);
  std::promise<void> ready;
  std::future<void> started = ready.get_future();
  thread_ = std::jthread([this, promise = std::move(ready)]() mutable { serve(std::move(promise)); });
  started.get();
}

UringReader::~UringReader() {
  queue_.stop();
  wake_event_.signal();
}

void UringReader::submit(const ReadJob& job) {
  queue_.push(job, [this] { wake_event_.signal(); });
}

void UringReader::submit_all(std::span<const ReadJob> jobs) {
  queue_.push_all(jobs, [this] { wake_event_.signal(); });
}

bool UringReader::promote(uint64_t tag) noexcept {
  const bool begun = queue_.promote(tag);
  wake_event_.signal();
  return begun;
}

void UringReader::cancel_background() noexcept {
  queue_.cancel_background();
  wake_event_.signal();
}

void UringReader::serve(std::promise<void> ready) {
  std::optional<UringRing> ring;
  try {
    ring.emplace(options_.queue_depth + 1);  // and one that waits for news
    register_all(*ring);
  } catch (...) {
    ready.set_exception(std::current_exception());
    return;
  }
  ready.set_value();
  std::vector<UringCompletion> completions;
  completions.reserve(2 * (options_.queue_depth + 1));
  uint64_t wake_counter = 0;
  bool listening = false;
  for (;;) {
    // Looked up first: nothing is queued after the end, and its signal comes only after it can be seen, so whoever
    // listens will hear of it, and nobody may begin to listen once it has come.
    const bool stopped = queue_.stopped();
    start_reads(*ring);
    if (!stopped && !listening) {
      ring->prepare_wake(wake_event_.descriptor(), &wake_counter, kWakeToken);
      listening = true;
    }
    if (stopped && !listening && free_tokens_.size() == options_.queue_depth) return;
    completions.clear();
    ring->submit_and_wait(completions);
    for (const UringCompletion& completion : completions) {
      if (completion.token == kWakeToken) {
        listening = false;
      } else {
        finish_read(completion);
      }
    }
  }
}

void UringReader::register_all(UringRing& ring) {
  std::vector<int> descriptors;
  for (size_t i = 0; i < files_.size(); ++i) descriptors.push_back(files_[i].descriptor());
  std::string refusal = ring.register_files(descriptors);
  registered_files_ = refusal.empty();
  if (!refusal.empty()) registration_refusal_ = "files not registered: " + refusal;
  refusal = ring.register_memory(options_.memory);
  if (!refusal.empty()) {
    registration_refusal_ += (registration_refusal_.empty() ? "" : ", ") + ("memory not registered: " + refusal);
  }
}

void UringReader::start_reads(UringRing& ring) {
  while (!free_tokens_.empty()) {
    std::optional<ReadChunk> chunk = queue_.try_take();
    if (!chunk) return;
    if (chunk->skip()) {
      hand_over(std::move(*chunk), {.bytes = 0, .error_number = ECANCELED});
      continue;
    }
    const uint32_t token = free_tokens_.back();
    free_tokens_.pop_back();
    const uint32_t file = chunk->job().file;
    ring.prepare_read(registered_files_ ? static_cast<int>(file) : files_[file].descriptor(), chunk->file_offset(),
                      chunk->length(), chunk->destination(), token);
    under_way_[token] = std::move(chunk);
  }
}

void UringReader::finish_read(const UringCompletion& completion) {
  const auto token = static_cast<uint32_t>(completion.token);
  ReadChunk chunk = *std::exchange(under_way_[token], std::nullopt);
  free_tokens_.push_back(token);
  const ReadOutcome outcome = outcome_of(chunk, completion.result);
  hand_over(std::move(chunk), outcome);
}

ReadOutcome UringReader::outcome_of(const ReadChunk& chunk, int32_t result) const {
  const SourceFile& file = files_[chunk.job().file];
  uint64_t done = 0;
  if (result < 0) {
    const bool try_again = result == -EAGAIN || result == -EINTR;
    if (!try_again) return {.bytes = 0, .error_number = -result};
  } else {
    done = static_cast<uint64_t>(result);
    if (done == chunk.length()) {
      if (!file.direct()) file.drop_cached(chunk.file_offset(), chunk.length());
      return {.bytes = done, .error_number = 0};
    }
    // A direct read must go on at an aligned position.
    done = done / kReadAlignmentBytes * kReadAlignmentBytes;
  }
  // Rare, and then mostly the end of the file: the rest is read here and now.
  const ReadOutcome rest = file.read(chunk.file_offset() + done, chunk.length() - done, chunk.destination() + done);
  return {.bytes = done + rest.bytes, .error_number = rest.error_number};
}

void UringReader::hand_over(ReadChunk chunk, const ReadOutcome& outcome) {
  completion_threads_.add({std::move(chunk), outcome, std::chrono::steady_clock::now()});
}

void UringReader::finish(const ArrivedChunk& arrived) {
  arrived.chunk.tell_sink(arrived.outcome);
  const std::optional<FinishedRead> finished = queue_.finish(arrived.chunk, arrived.outcome, arrived.time);
  if (!finished) return;
  if (finished->turned_away) wake_event_.signal();
  finished->tell_sink();
}

}  // namespace zipmoe
