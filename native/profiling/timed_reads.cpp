#include "profiling/timed_reads.hpp"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <mutex>
#include <stdexcept>

#include "io/reader.hpp"

namespace zipmoe {

namespace {

// Hands out the blocks of a memory one after the other, except those that are in use.
class Blocks {
 public:
  Blocks(uint64_t blocks, uint64_t first, uint32_t users) : blocks_(blocks), next_(first), in_use_(users, blocks) {}

  // The block that this user had is free again. There are at least as many blocks as users.
  uint64_t take(uint32_t user) {
    std::lock_guard lock(mutex_);
    in_use_[user] = blocks_;
    while (std::ranges::find(in_use_, next_) != in_use_.end()) advance();
    in_use_[user] = next_;
    advance();
    return in_use_[user];
  }
  uint64_t next() const { return next_; }

 private:
  void advance() { next_ = (next_ + 1) % blocks_; }

  const uint64_t blocks_;
  uint64_t next_;
  std::vector<uint64_t> in_use_;  // by user; none: the number of blocks
  std::mutex mutex_;
};

}  // namespace

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
  const uint64_t memory_blocks = memory.size() / block_bytes;
  Blocks blocks(memory_blocks, next_byte_ / block_bytes % memory_blocks, workers_.threads());
  std::atomic<size_t> next{0};
  std::atomic<uint64_t> bytes{0};
  std::atomic<int> error_number{0};
  const auto begin = std::chrono::steady_clock::now();
  workers_.run(workers_.threads(), [&](uint32_t worker) {
    for (size_t i = next++; i < places.size() && error_number == 0; i = next++) {
      uint8_t* destination = memory.data() + blocks.take(worker) * block_bytes;
      const ReadOutcome outcome = files_[places[i].file].read(places[i].offset, block_bytes, destination);
      bytes += outcome.bytes;
      if (outcome.error_number != 0) error_number = outcome.error_number;
    }
  });
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  next_byte_ = blocks.next() * block_bytes;
  return {seconds, bytes, error_number};
}

std::string TimedReads::fallback_reason() const {
  for (const SourceFile& file : files_) {
    if (!file.direct()) return file.fallback_reason();
  }
  return {};
}

}  // namespace zipmoe
