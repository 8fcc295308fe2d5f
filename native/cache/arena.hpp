// The one large memory region of the engine: dense records, scratch and expert slots. Address space is reserved at
// once; memory is made usable region by region, touched when it is first written, or in the background before that, and
// then reused for ever, because fresh pages cost more than the disk.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "cache/memory_populator.hpp"

namespace zipmoe {

inline constexpr uint64_t kHugePageBytes = uint64_t{2} << 20;
// Readable bytes after the arena's last byte that may be asked for: decoders read whole vectors past the end of a
// section.
inline constexpr uint64_t kReadableTailBytes = 4096;

constexpr uint64_t round_up(uint64_t value, uint64_t multiple) { return (value + multiple - 1) / multiple * multiple; }
constexpr uint64_t round_down(uint64_t value, uint64_t multiple) { return value / multiple * multiple; }

// A forked child does not get the arena: direct reads into memory that a fork shares may end up in the wrong process.
class Arena {
 public:
  // Reserves address space only; throws std::system_error.
  explicit Arena(uint64_t bytes);
  ~Arena();
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  uint8_t* data() const { return base_; }  // 2 MiB aligned
  uint64_t bytes() const { return bytes_; }

  // Makes a range readable and writable and asks for huge pages; throws std::system_error.
  void commit(uint64_t offset, uint64_t length);
  // Gives the memory of the whole huge pages inside the range back to the system; they read as zeros afterwards.
  void release(uint64_t offset, uint64_t length) noexcept;

  // What is committed from now on will be touched in the background, from begin_populating() on, unless it was claimed
  // before. Not thread-safe, as all of this.
  void prepare_populating(uint32_t threads) { populator_ = std::make_unique<MemoryPopulator>(base_, bytes_, threads); }
  void begin_populating() {
    if (populator_) populator_->begin();
  }
  void stop_populating() noexcept { populator_.reset(); }
  // To be called before a range that was committed is used.
  void claim(uint64_t offset, uint64_t length) noexcept {
    if (populator_) populator_->claim(offset, offset + length);
  }
  // Waits until nothing is left to be touched.
  void finish_populating() {
    if (populator_) populator_->finish();
  }

 private:
  uint8_t* base_ = nullptr;
  uint64_t bytes_ = 0;
  void* mapping_ = nullptr;
  uint64_t mapping_bytes_ = 0;
  pid_t process_;
  std::unique_ptr<MemoryPopulator> populator_;
};

}  // namespace zipmoe
