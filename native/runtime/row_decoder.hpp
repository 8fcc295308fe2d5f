// Decodes row ranges of a matrix on the worker pool. Tasks write disjoint rows, so the result does not depend on
// threads.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "codec/codec.hpp"
#include "runtime/worker_pool.hpp"
#include "simd/instruction_set.hpp"

namespace zipmoe {

// Exponents of a matrix that have been decompressed, or just are, into [rows][columns].
struct PreparedExponents {
  enum class Shard : uint8_t { absent, ready, coming };
  const uint8_t* exponents = nullptr;
  uint32_t shard_begin = 0;
  std::vector<Shard> shards;                  // from shard_begin on; all that the rows lie in
  std::function<void(uint32_t shard)> await;  // returns when a coming one is ready; throws FormatError
};

// Positions in `rows` in ascending order of the row numbers there: rows that share work are neighbours.
std::vector<uint32_t> ascending_order(std::span<const int64_t> rows);

class RowDecoder {
 public:
  RowDecoder(const Codec& codec, InstructionSet instruction_set, uint32_t threads)
      : codec_(codec), instruction_set_(instruction_set), workers_(threads) {}

  // Threads that decode, the caller included.
  uint32_t threads() const { return workers_.threads(); }

  // Rows row_begin .. row_end - 1 into `out` [row_end - row_begin][columns].
  void decode(const MatrixView& view, uint64_t row_begin, uint64_t row_end, uint16_t* out);
  // The same when some shards need only be recombined.
  void decode(const MatrixView& view, const PreparedExponents& prepared, uint64_t row_begin, uint64_t row_end,
              uint16_t* out);
  // Rows of a matrix that is cut into `blocks` of consecutive rows (all with the same columns): those with the given
  // numbers, in this order, into `out` [rows.size()][columns]. The numbers must be in range.
  void gather(std::span<const MatrixView> blocks, std::span<const int64_t> rows, uint16_t* out);
  // The same for some of the rows: those at the positions `order`, which are in ascending order of their row numbers.
  void gather(std::span<const MatrixView> blocks, std::span<const int64_t> rows, std::span<const uint32_t> order,
              uint16_t* out);

 private:
  const Codec& codec_;
  const InstructionSet instruction_set_;
  WorkerPool workers_;
};

}  // namespace zipmoe
