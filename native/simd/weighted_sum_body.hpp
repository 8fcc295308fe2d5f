// The kernel of weighted_sum_kernels.hpp, written once in vectors. ZIPMOE_VECTOR_CODE marks the functions
// (wide_code.hpp).
#pragma once
#include "simd/lane_vectors.hpp"
#include "simd/weighted_sum_kernels.hpp"

namespace zipmoe::simd {
namespace {

// Vectors of columns whose sums are in registers at once.
constexpr uint64_t kSumVectors = 2;

// kSumVectors * kVectorLanes columns, from `column` on.
ZIPMOE_VECTOR_CODE inline __attribute__((always_inline)) void sum_columns(const WeightedRows& terms, uint64_t column,
                                                                          uint16_t* out) {
  Floats16 sums[kSumVectors] = {};
  for (uint64_t term = 0; term < terms.count; ++term) {
    const uint16_t* row = terms.rows[term] + column;
    const float weight = terms.weights[term];
#pragma GCC unroll 2
    for (uint64_t i = 0; i < kSumVectors; ++i) {
      Floats16 values;
      widen(row + i * kVectorLanes, values);
      sums[i] += weight * values;
    }
  }
#pragma GCC unroll 2
  for (uint64_t i = 0; i < kSumVectors; ++i) {
    Words16 rounded;
    round_to_upper_halves(sums[i], rounded);
    store_upper_halves(rounded, out + i * kVectorLanes);
  }
}

ZIPMOE_VECTOR_CODE inline __attribute__((always_inline)) void sum_rows(const WeightedRows& terms, uint16_t* out) {
  constexpr uint64_t step = kSumVectors * kVectorLanes;
  uint64_t column = 0;
  for (; column + step <= terms.size; column += step) sum_columns(terms, column, out + column);
  for (; column < terms.size; ++column) {
    float sum = 0.0f;
    for (uint64_t term = 0; term < terms.count; ++term) sum += terms.weights[term] * widened(terms.rows[term][column]);
    out[column] = rounded_to_half(sum);
  }
}

}  // namespace
}  // namespace zipmoe::simd
