// How the rows of a matrix are divided into tasks, and the tokens of a task into turns. The division has no influence
// on any result.
#pragma once
#include <algorithm>
#include <cstdint>

#include "simd/fx3_record.hpp"
#include "simd/gemm_tiles.hpp"
#include "simd/gemv_kernels.hpp"

namespace zipmoe {

// Large enough to stream, small enough that no thread waits long for another one's last task.
constexpr uint64_t kTaskBytes = 256 << 10;
constexpr uint64_t kTaskRowsMax = 128;
constexpr uint64_t kManyTokens = 128;
// Rows of sums that a task of kTaskRowsMax rows needs, where it begins and ends within groups.
constexpr uint64_t kTaskSumRows = kTaskRowsMax + 2 * simd::kFx3GroupRows;

// Tokens that a task multiplies at once: their inputs stay in the second-level cache, and so do the sums.
constexpr uint64_t kTurnTokensMax = simd::kGemmTokensMax;

// Consecutive tokens.
struct TokenRange {
  uint64_t begin;
  uint64_t end;

  uint64_t count() const { return end - begin; }
};

// Sums of one turn of a task.
using TaskSums = float[kTurnTokensMax][kTaskSumRows];

// Calls body(TokenRange) for turns of about the same size, in whole tiles but for the last.
template <typename Body>
void for_each_turn(uint64_t tokens, const Body& body) {
  static_assert(kTurnTokensMax % simd::kTileTokensMax == 0);
  const uint64_t turns = (tokens + kTurnTokensMax - 1) / kTurnTokensMax;
  const uint64_t size = simd::tile_count((tokens + turns - 1) / turns) * simd::kTileTokensMax;
  for (uint64_t begin = 0; begin < tokens; begin += size) body(TokenRange{begin, std::min(begin + size, tokens)});
}

// Rows per task, a multiple of four, where four rows are `group_bytes` of weights. With many tokens inputs go by once
// per task, but what is unpacked of its rows has to stay in the second-level cache (measured with 1 MB).
constexpr uint64_t rows_per_task(uint64_t group_bytes, uint64_t tokens) {
  const uint64_t bytes = tokens < kManyTokens ? kTaskBytes : kTaskBytes + kTaskBytes / 2;
  return simd::kFx3GroupRows * std::clamp(bytes / group_bytes, uint64_t{1}, kTaskRowsMax / simd::kFx3GroupRows);
}

// The same, where the tasks are all that there is to do: the threads get equally many.
constexpr uint64_t rows_per_task(uint64_t group_bytes, uint64_t tokens, uint64_t rows, uint64_t threads) {
  const uint64_t most = rows_per_task(group_bytes, tokens);
  const uint64_t tasks = ((rows + most - 1) / most + threads - 1) / threads * threads;
  const uint64_t each = (rows + tasks - 1) / tasks;
  return (each + simd::kFx3GroupRows - 1) / simd::kFx3GroupRows * simd::kFx3GroupRows;
}

}  // namespace zipmoe
