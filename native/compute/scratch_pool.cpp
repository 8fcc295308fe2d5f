#include "compute/scratch_pool.hpp"

namespace zipmoe {

std::vector<ScratchPool::Line> ScratchPool::take(uint64_t values) {
  std::vector<Line> lines;
  {
    std::lock_guard lock(mutex_);
    if (!free_.empty()) {
      lines = std::move(free_.back());
      free_.pop_back();
    } else {
      free_.reserve(++buffers_);  // giving back allocates nothing
    }
  }
  const uint64_t count = (values * sizeof(uint16_t) + sizeof(Line) - 1) / sizeof(Line);
  if (lines.size() < count) lines.resize(count);
  return lines;
}

void ScratchPool::give_back(std::vector<Line> lines) noexcept {
  std::lock_guard lock(mutex_);
  free_.push_back(std::move(lines));
}

}  // namespace zipmoe
