#include "profiling/timed_reader.hpp"

#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <vector>

#include "codec/arriving_checksum.hpp"

namespace zipmoe {
namespace {

// Gives each read a slot of the memory, which is free again when the read is complete. Checksums are computed while the
// bytes arrive.
class SlotSink final : public ReadSink {
 public:
  SlotSink(std::span<uint8_t> memory, uint64_t length, uint64_t first, bool checksums)
      : memory_(memory), length_(length), checksums_(checksums), slots_(memory.size() / length) {
    for (uint64_t i = 0; i < slots_; ++i) free_.push_back((first + i) % slots_);
    arriving_.resize(checksums ? slots_ : 0);
  }

  uint8_t* place(uint64_t slot) const { return memory_.data() + slot * length_; }

  uint64_t take_slot() {
    std::unique_lock lock(mutex_);
    completed_.wait(lock, [this] { return !free_.empty(); });
    const uint64_t slot = free_.front();
    free_.pop_front();
    return slot;
  }

  // Before the read of the slot is submitted; throws std::bad_alloc.
  void prepare(uint64_t slot) {
    if (checksums_) arriving_[slot] = std::make_unique<ArrivingChecksum>(place(slot), length_);
  }

  void wait_for_all() {
    std::unique_lock lock(mutex_);
    completed_.wait(lock, [this] { return free_.size() == slots_; });
  }

  void chunk_read(uint64_t tag, uint64_t begin, uint64_t length) noexcept override {
    if (checksums_) arriving_[tag]->arrived(begin, begin + length);
  }

  void read_completed(const ReadCompletion& completion) noexcept override {
    const bool whole = completion.error_number == 0 && completion.bytes == length_;
    const uint64_t checksum = checksums_ && whole ? arriving_[completion.tag]->finish() : 0;
    // The lock is kept: afterwards this object may be gone.
    std::lock_guard lock(mutex_);
    checksum_ ^= checksum;
    bytes_ += completion.bytes;
    if (error_number_ == 0) error_number_ = completion.error_number;
    free_.push_back(completion.tag);
    completed_.notify_one();
  }

  uint64_t bytes() const { return bytes_; }
  int error_number() const { return error_number_; }

 private:
  const std::span<uint8_t> memory_;
  const uint64_t length_;
  const bool checksums_;
  const uint64_t slots_;
  std::mutex mutex_;
  std::condition_variable completed_;
  std::deque<uint64_t> free_;                                // those that have been free longest first
  std::vector<std::unique_ptr<ArrivingChecksum>> arriving_;  // by slot
  uint64_t bytes_ = 0;
  uint64_t checksum_ = 0;
  int error_number_ = 0;
};

}  // namespace

TimedReadResult TimedReader::read(std::span<const BlockPlace> places, uint64_t length, std::span<uint8_t> memory,
                                  bool checksums) {
  if (length == 0 || length % kReadAlignmentBytes != 0) {
    throw std::invalid_argument("the length must be a positive multiple of 4096");
  }
  if (reinterpret_cast<uintptr_t>(memory.data()) % kReadAlignmentBytes != 0 || memory.size() < length) {
    throw std::invalid_argument("the memory must be aligned to 4096 and hold one read");
  }
  const uint64_t slots = memory.size() / length;
  SlotSink sink(memory, length, next_byte_ / length % slots, checksums);
  const auto begin = std::chrono::steady_clock::now();
  for (const BlockPlace& place : places) {
    const uint64_t slot = sink.take_slot();
    try {
      sink.prepare(slot);
      reader_->submit({.file = place.file,
                       .offset = place.offset,
                       .length = length,
                       .destination = sink.place(slot),
                       .tag = slot,
                       .sink = &sink});
    } catch (...) {
      sink.read_completed({.tag = slot, .bytes = 0, .error_number = ECANCELED});
      sink.wait_for_all();
      throw;
    }
  }
  sink.wait_for_all();
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  next_byte_ = (next_byte_ / length + places.size()) % slots * length;
  return {seconds, sink.bytes(), sink.error_number()};
}

}  // namespace zipmoe
