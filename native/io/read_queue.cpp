#include "io/read_queue.hpp"

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

ReadQueue::ReadQueue(uint32_t files, uint64_t chunk_bytes, uint32_t capacity)
    : files_(files), chunk_bytes_(chunk_bytes), capacity_(capacity) {
  if (capacity == 0) throw std::invalid_argument("the reader needs a queue of at least one read");
  if (chunk_bytes == 0 || chunk_bytes % kReadAlignmentBytes != 0) {
    throw std::invalid_argument("the chunk length must be a multiple of 4096");
  }
}

bool ReadQueue::push(const ReadJob& job) {
  if (job.file >= files_) throw std::out_of_range("no such file in the reader");
  if (job.sink == nullptr || job.destination == nullptr)
    throw std::invalid_argument("a read needs a destination and a sink");
  if (job.length == 0) throw std::invalid_argument("a read needs at least one byte");
  if (job.split > 0 && (job.split >= job.length || job.rest_destination == nullptr)) {
    throw std::invalid_argument("a split read needs bytes and a destination on both sides");
  }
  auto pending = std::make_shared<Pending>();
  pending->job = job;
  const auto chunks = [this](uint64_t bytes) { return (bytes + chunk_bytes_ - 1) / chunk_bytes_; };
  pending->chunks_left = static_cast<uint32_t>(chunks(job.split) + chunks(job.length - job.split));
  bool turned_away;
  {
    std::unique_lock lock(mutex_);
    room_available_.wait(lock, [this] { return outstanding_ < capacity_; });
    pending->submitted = Clock::now();
    if (outstanding_++ == 0) busy_since_ = pending->submitted;
    queue_.push_back(std::move(pending));
    turned_away = std::exchange(turned_away_, false);
  }
  work_available_.notify_all();
  return turned_away;
}

ReadChunk ReadQueue::take_first() {
  std::shared_ptr<Pending> pending = queue_.front();
  const uint64_t begin = pending->next_chunk;
  const uint64_t length = std::min(chunk_bytes_, pending->job.contiguous_bytes(begin));
  pending->next_chunk = begin + length;
  if (pending->next_chunk == pending->job.length) queue_.pop_front();
  const bool skip = stopping_ || pending->error_number != 0;
  return {std::move(pending), begin, length, skip};
}

std::optional<ReadChunk> ReadQueue::take() {
  std::unique_lock lock(mutex_);
  work_available_.wait(lock, [this] { return stopping_ || !queue_.empty(); });
  if (queue_.empty()) return std::nullopt;
  return take_first();
}

std::optional<ReadChunk> ReadQueue::try_take() {
  std::lock_guard lock(mutex_);
  if (queue_.empty()) {
    turned_away_ = true;
    return std::nullopt;
  }
  return take_first();
}

std::optional<FinishedRead> ReadQueue::finish(const ReadChunk& chunk, const ReadOutcome& outcome) {
  Pending& pending = *chunk.pending_;
  {
    std::lock_guard lock(mutex_);
    pending.bytes += outcome.bytes;
    if (pending.error_number == 0) pending.error_number = outcome.error_number;
    if (--pending.chunks_left > 0) return std::nullopt;
    const Clock::time_point now = Clock::now();
    const double latency = seconds_between(pending.submitted, now);
    counters_.reads += 1;
    counters_.bytes += pending.bytes;
    counters_.latency_seconds += latency;
    counters_.longest_seconds = std::max(counters_.longest_seconds, latency);
    if (--outstanding_ == 0) counters_.busy_seconds += seconds_between(busy_since_, now);
  }
  room_available_.notify_one();
  return FinishedRead{pending.job.sink, {pending.job.tag, pending.bytes, pending.error_number}};
}

void ReadQueue::cancel() noexcept {
  std::lock_guard lock(mutex_);
  for (const std::shared_ptr<Pending>& pending : queue_) {
    if (pending->error_number == 0) pending->error_number = ECANCELED;
  }
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
