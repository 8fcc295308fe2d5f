#include "profiling/timed_work.hpp"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <stdexcept>
#include <thread>
#include <vector>

#include "codec/bfloat16_fields.hpp"

namespace zipmoe {
namespace {

constexpr uint64_t kCacheLineBytes = 64;
constexpr uint64_t kMemoryUnitBytes = uint64_t{1} << 20;

// The part of `scratch` that worker `slot` of `workers` writes to.
std::span<uint8_t> scratch_of(std::span<uint8_t> scratch, uint32_t slot, uint32_t workers, uint64_t needed_bytes) {
  const uint64_t part = scratch.size() / workers / kCacheLineBytes * kCacheLineBytes;
  if (part < needed_bytes) throw std::invalid_argument("the scratch memory is too small");
  return scratch.subspan(slot * part, needed_bytes);
}

uint64_t sum_of_words(std::span<const uint8_t> bytes) {
  constexpr uint64_t kLanes = 16;
  constexpr uint64_t kAheadBytes = 6144;  // as far as the products' kernels and checksums look, about
  uint64_t lanes[kLanes] = {};
  uint64_t words[kLanes];
  static_assert(sizeof(words) == 2 * kCacheLineBytes);
  for (uint64_t at = 0; at + sizeof(words) <= bytes.size(); at += sizeof(words)) {
    std::memcpy(words, bytes.data() + at, sizeof(words));
    if (at + kAheadBytes + sizeof(words) <= bytes.size()) {
      __builtin_prefetch(bytes.data() + at + kAheadBytes, 0, 0);
      __builtin_prefetch(bytes.data() + at + kAheadBytes + kCacheLineBytes, 0, 0);
    }
    for (uint64_t lane = 0; lane < kLanes; ++lane) lanes[lane] += words[lane];
  }
  uint64_t sum = 0;
  for (uint64_t lane : lanes) sum += lane;
  return sum;
}

}  // namespace

uint64_t memory_unit_bytes(uint64_t buffer_bytes) { return std::min(buffer_bytes, kMemoryUnitBytes); }

template <typename Body>
double TimedWork::timed(uint64_t units, const Body& body) {
  using Clock = std::chrono::steady_clock;
  const uint32_t threads = workers_.threads();
  std::atomic<uint64_t> next{0};
  std::atomic<uint32_t> waiting{threads};
  std::vector<Clock::time_point> begins(threads);
  std::vector<Clock::time_point> ends(threads);
  workers_.run(threads, [&](uint32_t slot) {
    // Nobody gets a second task before all have begun their first one. They do not sleep meanwhile: then somebody would
    // have to be woken again.
    for (--waiting; waiting.load() != 0;) std::this_thread::yield();
    begins[slot] = Clock::now();
    for (uint64_t unit = next++; unit < units; unit = next++) body(unit, slot);
    ends[slot] = Clock::now();
  });
  return std::chrono::duration<double>(*std::ranges::max_element(ends) - *std::ranges::min_element(begins)).count();
}

double TimedWork::decompress(const PlanarCodec& codec, std::span<const CompressedShard> shards, uint64_t units,
                             std::span<uint8_t> scratch) {
  if (std::string reason = codec.unavailable_reason(); !reason.empty()) throw UnknownCodec(reason);
  if (shards.empty()) throw std::invalid_argument("there are no shards");
  return timed(units, [&](uint64_t unit, uint32_t slot) {
    const CompressedShard& shard = shards[unit % shards.size()];
    codec.decompress_exponents(shard.compressed, scratch_of(scratch, slot, workers(), shard.raw_bytes));
  });
}

double TimedWork::recombine(std::span<const Planes> planes, uint64_t units, std::span<uint8_t> scratch,
                            InstructionSet instruction_set) {
  if (planes.empty()) throw std::invalid_argument("there are no planes");
  if (reinterpret_cast<uintptr_t>(scratch.data()) % kCacheLineBytes != 0) {
    throw std::invalid_argument("the scratch memory must be aligned to 64 bytes");
  }
  return timed(units, [&](uint64_t unit, uint32_t slot) {
    const Planes& matrix = planes[unit % planes.size()];
    const std::span<uint8_t> out = scratch_of(scratch, slot, workers(), matrix.exponent.size() * sizeof(uint16_t));
    zipmoe::recombine(matrix.exponent, matrix.sign_mantissa,
                      {reinterpret_cast<uint16_t*>(out.data()), matrix.exponent.size()}, instruction_set);
  });
}

double TimedWork::read_memory(std::span<const uint8_t> memory, uint64_t units) {
  const uint64_t bytes = memory_unit_bytes(memory.size());
  if (bytes == 0) throw std::invalid_argument("there is no memory to read");
  std::atomic<uint64_t> sink{0};  // keeps the compiler from leaving the reads out
  return timed(units, [&](uint64_t unit, uint32_t) {
    sink += sum_of_words(memory.subspan(unit % (memory.size() / bytes) * bytes, bytes));
  });
}

double TimedWork::copy_memory(std::span<const uint8_t> source, std::span<uint8_t> target, uint64_t units) {
  if (source.size() != target.size()) throw std::invalid_argument("source and target differ in length");
  const uint64_t bytes = memory_unit_bytes(source.size());
  if (bytes == 0) throw std::invalid_argument("there is no memory to copy");
  return timed(units, [&](uint64_t unit, uint32_t) {
    const uint64_t at = unit % (source.size() / bytes) * bytes;
    std::memcpy(target.data() + at, source.data() + at, bytes);
  });
}

}  // namespace zipmoe
