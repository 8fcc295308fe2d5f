// Memory for what a task or a step needs while it runs, kept for the next one.
#pragma once
#include <cstdint>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

namespace zipmoe {

// Lends the smallest buffer that is large enough. Keeps what is given back up to kKeptBytes in all: what a very long
// prompt needs beyond that goes back to the system. Safe for any threads.
class ScratchPool {
  struct alignas(64) Line {
    uint16_t values[32];
  };
  struct Buffer {
    std::unique_ptr<Line[]> lines;
    uint64_t count = 0;

    uint64_t bytes() const { return count * sizeof(Line); }
  };

 public:
  static constexpr uint64_t kKeptBytes = 16 << 20;

  // Gives its buffer back at its end, when the pool must still be there.
  class Lease {
   public:
    // Of `values` 16-bit values, whose contents are arbitrary.
    Lease(ScratchPool& pool, uint64_t values) : pool_(&pool), buffer_(pool.take(values)) {}
    Lease(Lease&& other) noexcept : pool_(std::exchange(other.pool_, nullptr)), buffer_(std::move(other.buffer_)) {}
    ~Lease() {
      if (pool_ != nullptr) pool_->give_back(std::move(buffer_));
    }
    Lease(const Lease&) = delete;
    Lease& operator=(const Lease&) = delete;
    Lease& operator=(Lease&&) = delete;

    const uint16_t* values() const { return buffer_.lines.get()->values; }
    uint16_t* values() { return buffer_.lines.get()->values; }  // 64-byte aligned

   private:
    ScratchPool* pool_;
    Buffer buffer_;
  };

  uint64_t kept_bytes() const;
  // Gives what is kept back to the system; what is lent stays.
  void clear();

 private:
  Buffer take(uint64_t values);
  void give_back(Buffer buffer) noexcept;

  mutable std::mutex mutex_;
  uint64_t buffers_ = 0;  // lent and kept ones
  uint64_t kept_bytes_ = 0;
  std::vector<Buffer> free_;  // by size, smallest first
};

}  // namespace zipmoe
