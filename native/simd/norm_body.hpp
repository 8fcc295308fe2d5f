// The kernels of norm_kernels.hpp, written once in vectors. ZIPMOE_VECTOR_CODE marks the functions (wide_code.hpp).
#pragma once
#include "simd/lane_vectors.hpp"
#include "simd/norm_kernels.hpp"

namespace zipmoe::simd {
namespace {

typedef uint16_t Halves8 __attribute__((vector_size(16)));
typedef uint32_t Words8 __attribute__((vector_size(32)));

constexpr uint64_t kSumLanes = 8;

// `count` is a constant of each caller: the rows' sums hide each other's latency.
ZIPMOE_VECTOR_CODE inline __attribute__((always_inline)) void sum_squares(const NormRows& rows, const uint64_t count,
                                                                          float* sums) {
  Floats8 lanes[kNormRows] = {};
  uint64_t i = 0;
  for (; i + kSumLanes <= rows.size; i += kSumLanes) {
#pragma GCC unroll 4
    for (uint64_t row = 0; row < count; ++row) {
      Halves8 halves;
      __builtin_memcpy(&halves, rows.x + row * rows.size + i, sizeof halves);
      const Floats8 values = (Floats8)(__builtin_convertvector(halves, Words8) << 16);
      lanes[row] += values * values;
    }
  }
#pragma GCC unroll 4
  for (uint64_t row = 0; row < count; ++row) {
    float left[kSumLanes];
    __builtin_memcpy(left, &lanes[row], sizeof left);
    for (uint64_t j = i; j < rows.size; ++j) {
      const float value = widened(rows.x[row * rows.size + j]);
      left[j - i] += value * value;
    }
    for (uint64_t half = kSumLanes / 2; half > 0; half /= 2) {
      for (uint64_t lane = 0; lane < half; ++lane) left[lane] += left[lane + half];
    }
    sums[row] = left[0];
  }
}

ZIPMOE_VECTOR_CODE inline __attribute__((always_inline)) void sum_squares(const NormRows& rows, float* sums) {
  if (rows.count == kNormRows) {
    sum_squares(rows, kNormRows, sums);
    return;
  }
  for (uint64_t row = 0; row < rows.count; ++row) sum_squares({rows.x + row * rows.size, 1, rows.size}, 1, sums + row);
}

ZIPMOE_VECTOR_CODE inline __attribute__((always_inline)) void scale_rows(const NormRows& rows, const float* factors,
                                                                         const uint16_t* weight, uint16_t* out) {
  for (uint64_t row = 0; row < rows.count; ++row) {
    const uint16_t* x = rows.x + row * rows.size;
    uint16_t* to = out + row * rows.size;
    uint64_t i = 0;
    for (; i + kVectorLanes <= rows.size; i += kVectorLanes) {
      Floats16 values;
      Floats16 weights;
      widen(x + i, values);
      widen(weight + i, weights);
      Words16 rounded;
      round_to_upper_halves(values * factors[row] * weights, rounded);
      store_upper_halves(rounded, to + i);
    }
    for (; i < rows.size; ++i) {
      to[i] = rounded_to_half(widened(x[i]) * factors[row] * widened(weight[i]));
    }
  }
}

}  // namespace
}  // namespace zipmoe::simd
