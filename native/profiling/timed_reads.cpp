#include "profiling/timed_reads.hpp"

#include <atomic>
#include <chrono>
#include <stdexcept>

#include "io/reader.hpp"

namespace zipmoe {

TimedReads::TimedReads(const std::vector<std::string>& paths, IoMode mode, uint32_t depth) : workers_(depth) {
  files_.reserve(paths.size());
  for (const std::string& path : paths) files_.emplace_back(path, mode);
}

TimedReadResult TimedReads::read(std::span<const BlockPlace> places, uint64_t block_bytes, std::span<uint8_t> memory) {
  if (block_bytes == 0 || block_bytes % kReadAlignmentBytes != 0) {
    throw std::invalid_argument("the block length must be a positive multiple of 4096");
  }
  if (reinterpret_cast<uintptr_t>(memory.data()) % kReadAlignmentBytes != 0 ||
      memory.size() / block_bytes < workers_.threads()) {
    throw std::invalid_argument("the memory must be aligned to 4096 and hold one block per read under way");
  }
  for (const BlockPlace& place : places) {
    if (place.file >= files_.size()) throw std::invalid_argument("no such file among those opened");
    if (place.offset % kReadAlignmentBytes != 0) throw std::invalid_argument("offsets must be multiples of 4096");
  }
  std::atomic<size_t> next{0};
  std::atomic<uint64_t> bytes{0};
  std::atomic<int> error_number{0};
  const auto begin = std::chrono::steady_clock::now();
  workers_.run(workers_.threads(), [&](uint32_t slot) {
    uint8_t* destination = memory.data() + slot * block_bytes;
    for (size_t i = next++; i < places.size() && error_number == 0; i = next++) {
      const ReadOutcome outcome = files_[places[i].file].read(places[i].offset, block_bytes, destination);
      bytes += outcome.bytes;
      if (outcome.error_number != 0) error_number = outcome.error_number;
    }
  });
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  return {seconds, bytes, error_number};
}

std::string TimedReads::fallback_reason() const {
  for (const SourceFile& file : files_) {
    if (!file.direct()) return file.fallback_reason();
  }
  return {};
}

}  // namespace zipmoe
