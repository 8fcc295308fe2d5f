// Address space of which only the pages in use take memory: room for records that are on disk and of which single
// pages are brought in, used and given back.
#pragma once

#include <sys/types.h>

#include <cstdint>

namespace zipmoe {

inline constexpr uint64_t kPageBytes = 4096;

// A forked child does not get the region, as it does not get the arena.
class SparseRegion {
 public:
  // Reserves address space only, `bytes` and a readable tail behind them; throws std::system_error.
  explicit SparseRegion(uint64_t bytes);
  ~SparseRegion();
  SparseRegion(const SparseRegion&) = delete;
  SparseRegion& operator=(const SparseRegion&) = delete;

  uint8_t* data() const { return base_; }  // 4096-aligned
  uint64_t bytes() const { return bytes_; }

  // Gives pages back to the system; they read as zeros afterwards. Multiples of 4096.
  void release(uint64_t offset, uint64_t length) noexcept;

 private:
  uint8_t* base_ = nullptr;
  uint64_t bytes_ = 0;
  pid_t process_;
};

}  // namespace zipmoe
