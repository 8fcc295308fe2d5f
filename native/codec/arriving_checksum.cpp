#include "codec/arriving_checksum.hpp"

#include <algorithm>
#include <chrono>
#include <new>

namespace zipmoe {

void ArrivingChecksum::arrived(uint64_t begin, uint64_t end) noexcept {
  std::unique_lock lock(mutex_);
  try {
    extend(begin, end);
  } catch (const std::bad_alloc&) {
    return;  // not known to be there, so left to finish()
  }
  if (computing_) return;
  while (computed_ < contiguous_) {
    const uint64_t until = contiguous_;
    computing_ = true;
    lock.unlock();
    const auto begun = std::chrono::steady_clock::now();
    compute(until);
    const auto elapsed = std::chrono::steady_clock::now() - begun;
    lock.lock();
    computing_ = false;
    nanoseconds_ += static_cast<uint64_t>(std::chrono::duration_cast<std::chrono::nanoseconds>(elapsed).count());
  }
}

uint64_t ArrivingChecksum::finish() noexcept {
  {
    std::lock_guard lock(mutex_);
    contiguous_ = length_;
    further_.clear();
  }
  arrived(length_, length_);
  return stream_.digest();
}

uint64_t ArrivingChecksum::nanoseconds() const {
  std::lock_guard lock(mutex_);
  return nanoseconds_;
}

void ArrivingChecksum::extend(uint64_t begin, uint64_t end) {
  if (begin > contiguous_) {
    const auto next = std::ranges::upper_bound(further_, begin, {}, &Interval::begin);
    const bool before = next != further_.begin() && std::prev(next)->end == begin;
    const bool behind = next != further_.end() && next->begin == end;
    if (before && behind) {
      std::prev(next)->end = next->end;
      further_.erase(next);
    } else if (before) {
      std::prev(next)->end = end;
    } else if (behind) {
      next->begin = begin;
    } else {
      further_.insert(next, {begin, end});
    }
    return;
  }
  contiguous_ = std::max(contiguous_, end);
  if (!further_.empty() && further_.front().begin <= contiguous_) {
    contiguous_ = std::max(contiguous_, further_.front().end);
    further_.erase(further_.begin());
  }
}

void ArrivingChecksum::compute(uint64_t end) noexcept {
  stream_.update({data_ + computed_, end - computed_});
  computed_ = end;
}

}  // namespace zipmoe
