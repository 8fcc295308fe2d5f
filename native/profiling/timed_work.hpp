// The steps of a reconstruction and the memory's own speed, timed on a given number of workers.
#pragma once

#include <cstdint>
#include <span>

#include "codec/planar.hpp"
#include "runtime/worker_pool.hpp"
#include "simd/instruction_set.hpp"

namespace zipmoe {

struct CompressedShard {
  std::span<const uint8_t> compressed;
  uint64_t raw_bytes = 0;
};

struct Planes {
  std::span<const uint8_t> exponent;
  std::span<const uint8_t> sign_mantissa;  // as long as the exponents
};

// All functions do `units` units of work, taking the given ones again and again in order, and return seconds. Each
// worker does whole units. `scratch` is cut into one part per worker, aligned to 64 bytes, which must hold a result.
class TimedWork {
 public:
  explicit TimedWork(uint32_t workers) : workers_(workers) {}
  uint32_t workers() const { return workers_.threads(); }

  // Unit: one shard of E. Throws FormatError.
  double decompress(const PlanarCodec& codec, std::span<const CompressedShard> shards, uint64_t units,
                    std::span<uint8_t> scratch);
  // Unit: the planes of one matrix, or of a part of it.
  double recombine(std::span<const Planes> planes, uint64_t units, std::span<uint8_t> scratch,
                   InstructionSet instruction_set);
  // Unit: 1 MiB (or the whole, if it is less) of `memory`.
  double read_memory(std::span<const uint8_t> memory, uint64_t units);
  // Unit: as above. Source and target are equally long.
  double copy_memory(std::span<const uint8_t> source, std::span<uint8_t> target, uint64_t units);

 private:
  // From the moment at which all workers are awake to the end of the last one: waking one takes as long as some work.
  template <typename Body>
  double timed(uint64_t units, const Body& body);

  WorkerPool workers_;
};

// Bytes of a unit of the memory functions for a buffer of this length.
uint64_t memory_unit_bytes(uint64_t buffer_bytes);

}  // namespace zipmoe
