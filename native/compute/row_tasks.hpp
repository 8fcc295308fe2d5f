// How the rows of a matrix are divided into tasks. The division has no influence on any result.
#pragma once
#include <algorithm>
#include <cstdint>

#include "simd/fx3_record.hpp"

namespace zipmoe {

// Large enough to stream, small enough that no thread waits long for another one's last task.
constexpr uint64_t kTaskBytes = 256 << 10;
constexpr uint64_t kTaskRowsMax = 128;
// Rows of sums that a task of kTaskRowsMax rows needs, where it begins and ends within groups.
constexpr uint64_t kTaskSumRows = kTaskRowsMax + 2 * simd::kFx3GroupRows;

// Rows per task, a multiple of four, where four rows are `group_bytes` of weights.
constexpr uint64_t rows_per_task(uint64_t group_bytes) {
  return simd::kFx3GroupRows * std::clamp(kTaskBytes / group_bytes, uint64_t{1}, kTaskRowsMax / simd::kFx3GroupRows);
}

}  // namespace zipmoe
