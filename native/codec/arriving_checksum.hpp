// The checksum of bytes that arrive in pieces, in any order and from several threads: computed meanwhile, so that
// little is left when the last piece comes.
#pragma once

#include <cstdint>
#include <mutex>
#include <vector>

#include "codec/checksum.hpp"

namespace zipmoe {

class ArrivingChecksum {
 public:
  // Of the `length` bytes that will be at `data`.
  ArrivingChecksum(const uint8_t* data, uint64_t length) : data_(data), length_(length) {}

  // The bytes [begin, end) are there, and were not before. Computes what follows on what is computed, unless another
  // thread is at it: that one goes on with them. Thread-safe.
  void arrived(uint64_t begin, uint64_t end) noexcept;
  // All bytes are there, whether anybody was told or not, and every call of arrived() has returned.
  uint64_t finish() noexcept;
  // Time spent so far, of all threads together.
  uint64_t nanoseconds() const;

 private:
  struct Interval {
    uint64_t begin;
    uint64_t end;
  };

  void extend(uint64_t begin, uint64_t end);
  void compute(uint64_t end) noexcept;

  const uint8_t* const data_;
  const uint64_t length_;
  mutable std::mutex mutex_;
  uint64_t contiguous_ = 0;        // all bytes before this one are there
  std::vector<Interval> further_;  // behind a gap; ascending, apart from each other
  bool computing_ = false;         // a thread is; the stream and what is computed are its own
  uint64_t nanoseconds_ = 0;
  uint64_t computed_ = 0;
  Xxh3Stream stream_;
};

}  // namespace zipmoe
