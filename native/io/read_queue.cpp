#include "io/read_queue.hpp"

#include <algorithm>
#include <cerrno>
#include <new>
#include <stdexcept>
#include <utility>

namespace zipmoe {
namespace {

// The disk reads blocks of this length as fast as longer ones, and is done with those under way in a millisecond or
// two.
constexpr uint64_t kBackgroundChunkBytes = uint64_t{1} << 20;

double seconds_between(std::chrono::steady_clock::time_point begin, std::chrono::steady_clock::time_point end) {
  return std::chrono::duration<double>(end - begin).count();
}

}  // namespace

ReadQueue::ReadQueue(uint32_t files, uint64_t chunk_bytes, uint32_t capacity, uint64_t least_chunk_bytes)
    : files_(files),
      chunk_bytes_(chunk_bytes),
      least_chunk_bytes_(std::min(chunk_bytes, least_chunk_bytes)),
      capacity_(capacity) {
  if (capacity == 0) throw std::invalid_argument("the reader needs a queue of at least one read");
  if (chunk_bytes == 0 || chunk_bytes % kReadAlignmentBytes != 0) {
    throw std::invalid_argument("the chunk length must be a multiple of 4096");
  }
  if (least_chunk_bytes == 0 || least_chunk_bytes % kReadAlignmentBytes != 0) {
    throw std::invalid_argument("the least chunk length must be a multiple of 4096");
  }
}

void ReadQueue::check(const ReadJob& job) const {
  if (job.file >= files_) throw std::out_of_range("no such file in the reader");
  if (job.sink == nullptr || job.destination == nullptr)
    throw std::invalid_argument("a read needs a destination and a sink");
  if (job.length == 0) throw std::invalid_argument("a read needs at least one byte");
  if (job.split > 0 && (job.split >= job.length || job.rest_destination == nullptr)) {
    throw std::invalid_argument("a split read needs bytes and a destination on both sides");
  }
}

void ReadQueue::push_all(std::span<const ReadJob> jobs, const std::function<void()>& wake) {
  std::vector<std::shared_ptr<Pending>> fresh;
  fresh.reserve(jobs.size());
  for (const ReadJob& job : jobs) {
    check(job);
    fresh.push_back(std::make_shared<Pending>());
    fresh.back()->job = job;
    fresh.back()->background = job.background;
  }
  for (size_t pushed = 0; pushed < fresh.size();) {
    bool turned_away = false;
    bool refused = false;
    {
      std::unique_lock lock(mutex_);
      room_available_.wait(lock, [this] { return outstanding_ < capacity_; });
      const Clock::time_point now = Clock::now();
      for (; pushed < fresh.size() && outstanding_ < capacity_; ++pushed) {
        if (!enqueue(fresh[pushed], now)) break;
      }
      refused = pushed < fresh.size() && outstanding_ < capacity_;
      turned_away = std::exchange(turned_away_, false);
    }
    work_available_.notify_all();
    if (turned_away && wake) wake();
    if (!refused) continue;
    const ReadJob& job = fresh[pushed++]->job;
    job.sink->read_completed({.tag = job.tag, .bytes = 0, .error_number = ENOMEM});
  }
}

bool ReadQueue::enqueue(const std::shared_ptr<Pending>& pending, Clock::time_point now) noexcept {
  try {
    if (pending->background) {
      background_.push_back(pending);
    } else {
      queue_.push_back(pending);
    }
  } catch (const std::bad_alloc&) {
    return false;
  }
  pending->begin = now;
  if (outstanding_++ == 0) busy_since_ = now;
  if (!pending->background) ++foreground_;
  return true;
}

bool ReadQueue::available() const {
  if (!queue_.empty()) return true;
  if (foreground_ > 0 && !stopping_) return false;
  return std::ranges::any_of(background_, [](const auto& pending) { return !pending->all_taken(); });
}

uint64_t ReadQueue::half_of(uint64_t left) const {
  const uint64_t half = std::max(least_chunk_bytes_, left / 2 / kReadAlignmentBytes * kReadAlignmentBytes);
  return left - std::min(left, half) < least_chunk_bytes_ / 2 ? left : half;
}

// There is one.
ReadChunk ReadQueue::take_first() {
  const bool foreground = !queue_.empty();
  std::shared_ptr<Pending> pending =
      foreground ? queue_.front() : *std::ranges::find_if(background_, [](const auto& p) { return !p->all_taken(); });
  const uint64_t begin = pending->next_chunk;
  const bool skip = stopping_ || pending->error_number != 0;
  const uint64_t left = pending->job.length - begin;
  const uint64_t most = pending->background ? kBackgroundChunkBytes : half_of(left);
  const uint64_t length = skip ? left : std::min({chunk_bytes_, most, pending->job.contiguous_bytes(begin)});
  if (pending->background && begin == 0) pending->begin = Clock::now();
  pending->next_chunk = begin + length;
  ++pending->chunks_under_way;
  if (foreground && pending->all_taken()) queue_.pop_front();
  return {std::move(pending), begin, length, skip};
}

std::optional<ReadChunk> ReadQueue::take() {
  std::unique_lock lock(mutex_);
  work_available_.wait(lock, [this] { return stopping_ || available(); });
  if (!available()) return std::nullopt;
  return take_first();
}

std::optional<ReadChunk> ReadQueue::try_take() {
  std::lock_guard lock(mutex_);
  if (!available()) {
    turned_away_ = true;
    return std::nullopt;
  }
  return take_first();
}

std::optional<FinishedRead> ReadQueue::finish(const ReadChunk& chunk, const ReadOutcome& outcome,
                                              Clock::time_point arrived) {
  Pending& pending = *chunk.pending_;
  bool idle = false;
  bool turned_away = false;
  {
    std::lock_guard lock(mutex_);
    pending.bytes += outcome.bytes;
    pending.carried_out = pending.carried_out || !chunk.skip();
    if (pending.error_number == 0) pending.error_number = outcome.error_number;
    pending.end = std::max(pending.end, arrived);
    last_arrival_ = std::max(last_arrival_, arrived);
    if (--pending.chunks_under_way > 0 || !pending.all_taken()) return std::nullopt;
    if (pending.background) {
      std::erase(background_, chunk.pending_);
    } else {
      idle = --foreground_ == 0 && !background_.empty();
      if (idle) turned_away = std::exchange(turned_away_, false);
    }
    if (pending.carried_out) {
      const double latency = seconds_between(pending.begin, pending.end);
      counters_.reads += 1;
      counters_.bytes += pending.bytes;
      counters_.latency_seconds += latency;
      counters_.longest_seconds = std::max(counters_.longest_seconds, latency);
    }
    if (--outstanding_ == 0) counters_.busy_seconds += seconds_between(busy_since_, last_arrival_);
  }
  if (idle) work_available_.notify_all();
  room_available_.notify_one();
  return FinishedRead{pending.job.sink, {pending.job.tag, pending.bytes, pending.error_number}, turned_away};
}

void ReadQueue::cancel() noexcept {
  std::lock_guard lock(mutex_);
  for (const std::shared_ptr<Pending>& pending : queue_) {
    if (pending->error_number == 0) pending->error_number = ECANCELED;
  }
}

bool ReadQueue::promote(uint64_t tag) noexcept {
  bool begun = true;
  {
    std::lock_guard lock(mutex_);
    const auto found =
        std::ranges::find_if(background_, [tag](const auto& pending) { return pending->job.tag == tag; });
    if (found == background_.end()) return true;
    const std::shared_ptr<Pending> pending = *found;
    background_.erase(found);
    pending->background = false;
    ++foreground_;
    begun = pending->next_chunk > 0;
    if (!begun) pending->begin = Clock::now();
    if (!pending->all_taken()) queue_.push_back(pending);
  }
  work_available_.notify_all();
  return begun;
}

void ReadQueue::cancel_background() noexcept {
  {
    std::lock_guard lock(mutex_);
    for (const std::shared_ptr<Pending>& pending : background_) {
      if (pending->error_number != 0 || pending->all_taken()) continue;
      pending->error_number = ECANCELED;
      queue_.push_front(pending);  // to be skipped at once, whoever else is being read
    }
  }
  work_available_.notify_all();
}

void ReadQueue::stop() noexcept {
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  work_available_.notify_all();
}

bool ReadQueue::stopped() const {
  std::lock_guard lock(mutex_);
  return stopping_;
}

ReadCounters ReadQueue::counters() const {
  std::lock_guard lock(mutex_);
  ReadCounters result = counters_;
  if (outstanding_ > 0) result.busy_seconds += seconds_between(busy_since_, Clock::now());
  return result;
}

}  // namespace zipmoe
