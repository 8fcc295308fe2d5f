// Whole records read through one of the executor's reader backends, timed: what the executor gets out of the disk, its
// own queues and threads included.
#pragma once

#include <cstdint>
#include <memory>
#include <span>

#include "io/reader.hpp"
#include "profiling/timed_reads.hpp"

namespace zipmoe {

class TimedReader {
 public:
  explicit TimedReader(std::unique_ptr<Reader> reader) : reader_(std::move(reader)) {}

  // Reads `length` bytes at each place, as many reads at a time as fit into `memory` (4096-aligned), and computes the
  // checksum of each if asked to, as the executor does. Each goes to the place that has been free longest, on from
  // where the call before ended.
  TimedReadResult read(std::span<const BlockPlace> places, uint64_t length, std::span<uint8_t> memory, bool checksums);

  const Reader& reader() const { return *reader_; }

 private:
  std::unique_ptr<Reader> reader_;
  uint64_t next_byte_ = 0;  // of the memory
};

}  // namespace zipmoe
