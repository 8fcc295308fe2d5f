// Memory for what a task needs while it runs, kept for the next one.
#pragma once
#include <cstdint>
#include <mutex>
#include <utility>
#include <vector>

namespace zipmoe {

// Has as many buffers as were ever used at once, each as large as the most that was asked of it. Safe for any threads.
class ScratchPool {
  struct alignas(64) Line {
    uint16_t values[32];
  };

 public:
  // Gives its buffer back at its end.
  class Lease {
   public:
    // Of `values` 16-bit values, whose contents are arbitrary.
    Lease(ScratchPool& pool, uint64_t values) : pool_(pool), lines_(pool.take(values)) {}
    ~Lease() { pool_.give_back(std::move(lines_)); }
    Lease(const Lease&) = delete;
    Lease& operator=(const Lease&) = delete;

    const uint16_t* values() const { return lines_.data()->values; }
    uint16_t* values() { return lines_.data()->values; }  // 64-byte aligned

   private:
    ScratchPool& pool_;
    std::vector<Line> lines_;
  };

 private:
  std::vector<Line> take(uint64_t values);
  void give_back(std::vector<Line> lines) noexcept;

  std::mutex mutex_;
  uint64_t buffers_ = 0;
  std::vector<std::vector<Line>> free_;  // the one that was used last at the end
};

}  // namespace zipmoe
