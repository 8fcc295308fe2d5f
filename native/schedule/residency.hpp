// What of an expert is in memory, and the work that is left per tensor: the reconstruction DAG.
#pragma once

#include <cstdint>
#include <vector>

namespace zipmoe {

// The values are those of the interface to Python. Being one value, a residency cannot be "full and half read" or hold
// a chunk twice: illegal combinations have no name.
enum class Residency : uint8_t {
  full = 0,           // F: BF16, ready to execute
  both_chunks = 1,    // C: compressed E-chunk and SM-chunk; of a fused codec, the packed record
  sign_mantissa = 2,  // S: the SM-chunk alone
  exponent = 3,       // E: the compressed E-chunk alone
  miss = 4,           // M: nothing
};

// Throws std::invalid_argument for a code that is not a residency.
Residency parse_residency(int64_t code);

// The residency of parts that are held apart; every combination has one.
constexpr Residency residency_of_chunks(bool holds_exponent, bool holds_sign_mantissa) {
  if (holds_exponent) return holds_sign_mantissa ? Residency::both_chunks : Residency::exponent;
  return holds_sign_mantissa ? Residency::sign_mantissa : Residency::miss;
}

constexpr bool holds_exponent(Residency residency) {
  return residency == Residency::both_chunks || residency == Residency::exponent;
}
constexpr bool holds_sign_mantissa(Residency residency) {
  return residency == Residency::both_chunks || residency == Residency::sign_mantissa;
}

// How a codec's sections lie on disk and reach the execution resource. A fused codec has one packed section and
// computes straight from it, so its records are in memory as a whole or not at all.
class ChunkLayout {
 public:
  static ChunkLayout fused() { return ChunkLayout(0); }
  // Throws std::invalid_argument for zero shards.
  static ChunkLayout separable(uint32_t shards);

  bool is_fused() const { return shards_ == 0; }
  uint32_t shards() const { return shards_; }  // K; 0 for a fused codec
  bool can_hold(Residency residency) const {
    return !is_fused() || (residency != Residency::sign_mantissa && residency != Residency::exponent);
  }

 private:
  explicit ChunkLayout(uint32_t shards) : shards_(shards) {}
  uint32_t shards_;
};

// Which kinds of work a tensor still needs before its expert may execute.
struct RemainingWork {
  bool read_exponent = false;
  bool decompress = false;
  bool read_sign_mantissa = false;  // of a fused codec: read the packed section
  bool recombine = false;

  bool any() const { return read_exponent || decompress || read_sign_mantissa || recombine; }
};

// `residency` is one that `layout` can hold.
RemainingWork remaining_work(Residency residency, const ChunkLayout& layout);

enum class OperationKind : uint8_t { read_exponent, decompress, read_sign_mantissa, read_packed, recombine, execute };

struct Operation {
  OperationKind kind;
  uint32_t shard;                      // of read_exponent and decompress; 0 otherwise
  std::vector<uint32_t> predecessors;  // indices of operations that must have ended, all smaller than the own one
};

// The reconstruction DAG of one tensor in topological order; the last operation is its expert's execution. Throws
// std::invalid_argument for a residency that the layout cannot hold.
std::vector<Operation> reconstruction_dag(Residency residency, const ChunkLayout& layout);

}  // namespace zipmoe
