#include "compute/scratch_pool.hpp"

#include <algorithm>

namespace zipmoe {

uint64_t ScratchPool::kept_bytes() const {
  std::lock_guard lock(mutex_);
  return kept_bytes_;
}

void ScratchPool::clear() {
  std::lock_guard lock(mutex_);
  buffers_ -= free_.size();
  kept_bytes_ = 0;
  free_.clear();
}

ScratchPool::Buffer ScratchPool::take(uint64_t values) {
  const uint64_t count = std::max<uint64_t>(1, (values * sizeof(uint16_t) + sizeof(Line) - 1) / sizeof(Line));
  Buffer buffer;
  {
    std::lock_guard lock(mutex_);
    auto fitting = std::lower_bound(free_.begin(), free_.end(), count,
                                    [](const Buffer& each, uint64_t least) { return each.count < least; });
    if (free_.empty()) {
      free_.reserve(buffers_ + 1);  // giving back allocates nothing
      ++buffers_;
    } else {
      if (fitting == free_.end()) --fitting;  // all are too small: a larger one takes the largest's place
      buffer = std::move(*fitting);
      free_.erase(fitting);
      kept_bytes_ -= buffer.bytes();
    }
  }
  if (buffer.count >= count) return buffer;
  buffer.lines.reset();  // before the other is there
  try {
    return {std::make_unique_for_overwrite<Line[]>(count), count};
  } catch (...) {
    std::lock_guard lock(mutex_);
    --buffers_;
    throw;
  }
}

void ScratchPool::give_back(Buffer buffer) noexcept {
  std::lock_guard lock(mutex_);
  if (kept_bytes_ + buffer.bytes() > kKeptBytes) {
    --buffers_;
    return;
  }
  kept_bytes_ += buffer.bytes();
  const auto behind = std::upper_bound(free_.begin(), free_.end(), buffer.count,
                                       [](uint64_t count, const Buffer& each) { return count < each.count; });
  free_.insert(behind, std::move(buffer));
}

}  // namespace zipmoe
