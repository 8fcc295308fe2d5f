// Matrix-vector product of a row-major BF16 matrix with AVX2 and FMA.
#if defined(__x86_64__)
#include "simd/canonical_dot_avx2.hpp"
#include "simd/denormals_avx.hpp"
#include "simd/gemv_kernels.hpp"
#include "simd/wide_code.hpp"

namespace zipmoe::simd {
namespace {

constexpr uint64_t kBlock = 64;
constexpr uint64_t kPrefetchWeights = 1024;  // hardware prefetchers stop at page borders

// `tokens` is a constant of each caller.
ZIPMOE_AVX2_CODE inline __attribute__((always_inline)) void multiply_step(Lanes256* lanes, const uint16_t* weights,
                                                                          const uint16_t* x, uint64_t stride,
                                                                          const uint64_t tokens) {
#pragma GCC unroll 3
  for (uint64_t token = 0; token < tokens; ++token) {
    multiply_add(lanes[token], weights, load_inputs(x + token * stride));
  }
}

ZIPMOE_AVX2_CODE inline __attribute__((always_inline)) void multiply_panel(const BFloat16GemvRun& run, uint64_t row,
                                                                           uint64_t begin, const uint16_t* x,
                                                                           const uint64_t tokens) {
  const uint64_t width = run.columns - begin < run.panel_columns ? run.columns - begin : run.panel_columns;
  const uint16_t* weights = run.weights + row * run.columns + begin;
  const uint64_t stride = run.inputs.stride;
  Lanes256 lanes[kGemvTokensMax];
#pragma GCC unroll 3
  for (uint64_t token = 0; token < tokens; ++token) lanes[token] = {_mm256_setzero_ps(), _mm256_setzero_ps()};
  uint64_t column = 0;
  for (; column + kBlock <= width; column += kBlock) {
    __builtin_prefetch(weights + column + kPrefetchWeights);
    __builtin_prefetch(weights + column + kPrefetchWeights + kStepColumns);
    multiply_step(lanes, weights + column, x + column, stride, tokens);
    multiply_step(lanes, weights + column + kStepColumns, x + column + kStepColumns, stride, tokens);
  }
  if (column < width) {
    alignas(32) uint16_t padded[kBlock] = {};
    __builtin_memcpy(padded, weights + column, (width - column) * sizeof(uint16_t));
    multiply_step(lanes, padded, x + column, stride, tokens);
    multiply_step(lanes, padded + kStepColumns, x + column + kStepColumns, stride, tokens);
  }
#pragma GCC unroll 3
  for (uint64_t token = 0; token < tokens; ++token) {
    float& out = run.sums[token * run.sums_stride + row];
    const float sum = sum_of_lanes(lanes[token]);
    out = begin == 0 ? sum : out + sum;
  }
}

ZIPMOE_AVX2_CODE inline __attribute__((always_inline)) void multiply_rows(const BFloat16GemvRun& run,
                                                                          const uint64_t tokens) {
  for (uint64_t row = 0; row < run.rows; ++row) {
    const uint16_t* x = run.inputs.x;
    for (uint64_t begin = 0; begin < run.columns; begin += run.panel_columns, x += run.inputs.panel_step) {
      multiply_panel(run, row, begin, x, tokens);
    }
  }
}

ZIPMOE_AVX2_CODE __attribute__((noinline)) void multiply_one_token(const BFloat16GemvRun& run) {
  multiply_rows(run, 1);
}
ZIPMOE_AVX2_CODE __attribute__((noinline)) void multiply_two_tokens(const BFloat16GemvRun& run) {
  multiply_rows(run, 2);
}
ZIPMOE_AVX2_CODE __attribute__((noinline)) void multiply_three_tokens(const BFloat16GemvRun& run) {
  multiply_rows(run, 3);
}

}  // namespace

ZIPMOE_AVX2_CODE void bfloat16_gemv_avx2(const BFloat16GemvRun& run) {
  const unsigned environment = _mm_getcsr();
  _mm_setcsr(kFlushDenormals);
  if (run.inputs.tokens == 1) {
    multiply_one_token(run);
  } else if (run.inputs.tokens == 2) {
    multiply_two_tokens(run);
  } else {
    multiply_three_tokens(run);
  }
  _mm_setcsr(environment);
}

}  // namespace zipmoe::simd
#endif
