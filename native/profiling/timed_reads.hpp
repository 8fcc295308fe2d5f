// Reads of equal length at a fixed queue depth, timed. They go through the executor's own SourceFile, and from place to
// place in memory as the executor's do, so that what is measured is what the executor will get: memory that is written
// again and again stays in the processor's caches, and reads into it are faster.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "io/source_file.hpp"
#include "runtime/worker_pool.hpp"

namespace zipmoe {

struct BlockPlace {
  uint32_t file = 0;
  uint64_t offset = 0;
};

struct TimedReadResult {
  double seconds = 0;  // from the first submission to the last completion
  uint64_t bytes = 0;
  int error_number = 0;  // of the first read that failed
};

class TimedReads {
 public:
  // Opens all files; throws FileOpenError. `depth` reads are under way at a time.
  TimedReads(const std::vector<std::string>& paths, IoMode mode, uint32_t depth);

  // Reads `block_bytes` bytes at each place, every one to the next block of `memory` (after the last one to the first;
  // a block that is being read into is passed over), on from where the call before ended. The memory has at least
  // depth * block_bytes bytes and is aligned like a direct read's destination.
  TimedReadResult read(std::span<const BlockPlace> places, uint64_t block_bytes, std::span<uint8_t> memory);

  uint32_t depth() const { return workers_.threads(); }
  // Why reads are not direct; empty if they are.
  std::string fallback_reason() const;

 private:
  std::vector<SourceFile> files_;
  uint64_t next_byte_ = 0;  // of the memory
  WorkerPool workers_;
};

}  // namespace zipmoe
