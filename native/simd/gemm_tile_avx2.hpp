// Products of four rows of weights with many tokens with AVX2 and FMA: some blocks of the rows lie widened to fp32 in
// the first-level cache, and tokens go by one after the other. For the *_gemm_avx2.cpp translation units.
#pragma once
#include <immintrin.h>
#include <stdint.h>

#include "simd/canonical_dot_avx2.hpp"
#include "simd/fx3_record.hpp"
#include "simd/gemv_kernels.hpp"
#include "simd/wide_code.hpp"

namespace zipmoe::simd {
namespace {

constexpr uint64_t kBlocksAtOnce = 8;
constexpr uint64_t kStepsAtOnce = kBlocksAtOnce * kFx3BlockWeights / kStepColumns;

// The weights of four rows, for each step of 32 columns: odd columns of lanes 0..7 and 8..15, then the even ones.
struct WideRows {
  alignas(32) float weights[kStepsAtOnce][kFx3GroupRows][4][8];
};

// The lanes of all tokens for four rows.
struct AllLanes {
  Lanes256 of[kGemmTokensMax][kFx3GroupRows];
};

ZIPMOE_AVX2_CODE inline __attribute__((always_inline)) void clear(AllLanes& lanes, uint64_t tokens) {
  for (uint64_t token = 0; token < tokens; ++token) {
    for (uint64_t row = 0; row < kFx3GroupRows; ++row) {
      lanes.of[token][row] = {_mm256_setzero_ps(), _mm256_setzero_ps()};
    }
  }
}

// Puts `steps` steps of one row to their place.
ZIPMOE_AVX2_CODE inline __attribute__((always_inline)) void widen(const uint16_t* weights, uint64_t steps, uint64_t row,
                                                                  WideRows& rows) {
  for (uint64_t step = 0; step < steps; ++step) {
    const __m256i low = _mm256_loadu_si256((const __m256i_u*)(weights + step * kStepColumns));
    const __m256i high = _mm256_loadu_si256((const __m256i_u*)(weights + step * kStepColumns + 16));
    float (*out)[8] = rows.weights[step][row];
    _mm256_store_ps(out[0], odd_columns(low));
    _mm256_store_ps(out[1], odd_columns(high));
    _mm256_store_ps(out[2], even_columns(low));
    _mm256_store_ps(out[3], even_columns(high));
  }
}

ZIPMOE_AVX2_CODE inline __attribute__((always_inline)) void multiply_step(Lanes256& lanes, const float (*weights)[8],
                                                                          const Inputs256& inputs) {
  lanes.low = _mm256_fmadd_ps(_mm256_load_ps(weights[0]), inputs.odd_low, lanes.low);
  lanes.high = _mm256_fmadd_ps(_mm256_load_ps(weights[1]), inputs.odd_high, lanes.high);
  lanes.low = _mm256_fmadd_ps(_mm256_load_ps(weights[2]), inputs.even_low, lanes.low);
  lanes.high = _mm256_fmadd_ps(_mm256_load_ps(weights[3]), inputs.even_high, lanes.high);
}

// Adds the products of `steps` steps to the lanes of every token; `inputs` from the first of the steps on.
ZIPMOE_AVX2_CODE inline __attribute__((always_inline)) void multiply_all_tokens(const WideRows& rows, uint64_t steps,
                                                                                const GemvInputs& inputs,
                                                                                AllLanes& lanes) {
  for (uint64_t token = 0; token < inputs.tokens; ++token) {
    const uint16_t* x = inputs.x + token * inputs.stride;
    Lanes256 row0 = lanes.of[token][0];
    Lanes256 row1 = lanes.of[token][1];
    Lanes256 row2 = lanes.of[token][2];
    Lanes256 row3 = lanes.of[token][3];
    for (uint64_t step = 0; step < steps; ++step) {
      const Inputs256 values = load_inputs(x + step * kStepColumns);
      multiply_step(row0, rows.weights[step][0], values);
      multiply_step(row1, rows.weights[step][1], values);
      multiply_step(row2, rows.weights[step][2], values);
      multiply_step(row3, rows.weights[step][3], values);
    }
    lanes.of[token][0] = row0;
    lanes.of[token][1] = row1;
    lanes.of[token][2] = row2;
    lanes.of[token][3] = row3;
  }
}

// The end of a panel: `sums` is [tokens][stride] from the first of the rows on, of which there are `rows`.
ZIPMOE_AVX2_CODE inline __attribute__((always_inline)) void add_panel(const AllLanes& lanes, uint64_t tokens,
                                                                      uint64_t rows, float* sums, uint64_t stride,
                                                                      bool add) {
  for (uint64_t token = 0; token < tokens; ++token) {
    for (uint64_t row = 0; row < rows; ++row) {
      const float sum = sum_of_lanes(lanes.of[token][row]);
      float& out = sums[token * stride + row];
      out = add ? out + sum : sum;
    }
  }
}

}  // namespace
}  // namespace zipmoe::simd
