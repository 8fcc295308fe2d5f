#include "io/thread_pool_reader.hpp"

#include <algorithm>
#include <cerrno>
#include <stdexcept>
#include <utility>

namespace zipmoe {
namespace {

double seconds_between(std::chrono::steady_clock::time_point begin, std::chrono::steady_clock::time_point end) {
  return std::chrono::duration<double>(end - begin).count();
}

}  // namespace

ThreadPoolReader::ThreadPoolReader(const std::vector<std::string>& paths, const ThreadPoolReaderOptions& options)
    : options_(options) {
  if (options.threads == 0) throw std::invalid_argument("the reader needs at least one thread");
  if (options.queue_capacity == 0) throw std::invalid_argument("the reader needs a queue of at least one read");
  if (options.chunk_bytes == 0 || options.chunk_bytes % kReadAlignmentBytes != 0) {
    throw std::invalid_argument("the chunk length must be a multiple of 4096");
  }
  files_.reserve(paths.size());
  for (const std::string& path : paths) files_.emplace_back(path, options.mode);
  threads_.reserve(options.threads);
  for (uint32_t i = 0; i < options.threads; ++i) threads_.emplace_back([this] { serve(); });
}

ThreadPoolReader::~ThreadPoolReader() {
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  work_available_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

void ThreadPoolReader::submit(const ReadJob& job) {
  if (job.file >= files_.size()) throw std::out_of_range("no such file in the reader");
  if (job.sink == nullptr || job.destination == nullptr)
    throw std::invalid_argument("a read needs a destination and a sink");
  if (job.length == 0) throw std::invalid_argument("a read needs at least one byte");
  if (job.split > 0 && (job.split >= job.length || job.rest_destination == nullptr)) {
    throw std::invalid_argument("a split read needs bytes and a destination on both sides");
  }
  auto pending = std::make_shared<Pending>();
  pending->job = job;
  const auto chunks = [this](uint64_t bytes) { return (bytes + options_.chunk_bytes - 1) / options_.chunk_bytes; };
  pending->chunks_left = static_cast<uint32_t>(chunks(job.split) + chunks(job.length - job.split));
  {
    std::unique_lock lock(mutex_);
    room_available_.wait(lock, [this] { return outstanding_ < options_.queue_capacity; });
    pending->submitted = Clock::now();
    if (outstanding_++ == 0) busy_since_ = pending->submitted;
    queue_.push_back(std::move(pending));
  }
  work_available_.notify_all();
}

void ThreadPoolReader::cancel() noexcept {
  std::lock_guard lock(mutex_);
  for (const std::shared_ptr<Pending>& pending : queue_) {
    if (pending->error_number == 0) pending->error_number = ECANCELED;
  }
}

void ThreadPoolReader::serve() {
  std::unique_lock lock(mutex_);
  for (;;) {
    work_available_.wait(lock, [this] { return stopping_ || !queue_.empty(); });
    if (queue_.empty()) return;  // stopping, and nothing is left to complete
    std::shared_ptr<Pending> pending = queue_.front();
    const uint64_t begin = pending->next_chunk;
    const uint64_t length = std::min(options_.chunk_bytes, pending->job.contiguous_bytes(begin));
    pending->next_chunk = begin + length;
    if (pending->next_chunk == pending->job.length) queue_.pop_front();
    const bool skip = stopping_ || pending->error_number != 0;
    lock.unlock();
    ReadOutcome outcome;
    if (skip) {
      outcome.error_number = ECANCELED;
    } else {
      const ReadJob& job = pending->job;
      outcome = files_[job.file].read(job.offset + begin, length, job.destination_of(begin));
    }
    finish_chunk(pending, outcome);
    pending.reset();
    lock.lock();
  }
}

void ThreadPoolReader::finish_chunk(const std::shared_ptr<Pending>& pending, const ReadOutcome& outcome) {
  {
    std::lock_guard lock(mutex_);
    pending->bytes += outcome.bytes;
    if (pending->error_number == 0) pending->error_number = outcome.error_number;
    if (--pending->chunks_left > 0) return;
    const Clock::time_point now = Clock::now();
    const double latency = seconds_between(pending->submitted, now);
    counters_.reads += 1;
    counters_.bytes += pending->bytes;
    counters_.latency_seconds += latency;
    counters_.longest_seconds = std::max(counters_.longest_seconds, latency);
    if (--outstanding_ == 0) counters_.busy_seconds += seconds_between(busy_since_, now);
  }
  room_available_.notify_one();
  pending->job.sink->read_completed({pending->job.tag, pending->bytes, pending->error_number});
}

ReadCounters ThreadPoolReader::counters() const {
  std::lock_guard lock(mutex_);
  ReadCounters result = counters_;
  if (outstanding_ > 0) result.busy_seconds += seconds_between(busy_since_, Clock::now());
  return result;
}

std::string ThreadPoolReader::mode() const { return fallback_reason().empty() ? "direct" : "buffered"; }

std::string ThreadPoolReader::fallback_reason() const {
  for (const SourceFile& file : files_) {
    if (!file.direct()) return file.fallback_reason();
  }
  return {};
}

}  // namespace zipmoe
