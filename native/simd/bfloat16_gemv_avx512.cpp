// Matrix-vector product of a row-major BF16 matrix with AVX-512 BF16.
#if defined(__x86_64__)
#include "simd/avx512_intrinsics.hpp"

#include "simd/denormals_avx.hpp"
#include "simd/gemv_kernels.hpp"
#include "simd/gemv_sum_avx512.hpp"
#include "simd/wide_code.hpp"

namespace zipmoe::simd {
namespace {

constexpr uint64_t kBlock = 64;
// Best of 512, 1024 and 2048: docs/results/fused_gemv.md.
constexpr uint64_t kPrefetchWeights = 2048;

ZIPMOE_AVX512_CODE inline __attribute__((always_inline)) void multiply_block(__m512* sums, __m512i first,
                                                                             __m512i second, const uint16_t* x,
                                                                             uint64_t stride, const uint64_t tokens) {
#pragma GCC unroll 3
  for (uint64_t token = 0; token < tokens; ++token) {
    const uint16_t* inputs = x + token * stride;
    sums[token] = _mm512_dpbf16_ps(sums[token], (__m512bh)first, (__m512bh)_mm512_load_si512(inputs));
    sums[token] = _mm512_dpbf16_ps(sums[token], (__m512bh)second, (__m512bh)_mm512_load_si512(inputs + 32));
  }
}

// One row at a time: several streams a multiple of 4 KiB apart come from memory a quarter slower, although two or four
// rows at once are half as fast again in the cache. `tokens` is a constant of each caller.
ZIPMOE_AVX512_CODE inline __attribute__((always_inline)) void multiply_row(const BFloat16GemvRun& run, uint64_t row,
                                                                           const uint64_t tokens) {
  const uint64_t stride = run.inputs.stride;
  const uint16_t* x = run.inputs.x;
  for (uint64_t begin = 0; begin < run.columns; begin += run.panel_columns, x += run.inputs.panel_step) {
    const uint64_t width = run.columns - begin < run.panel_columns ? run.columns - begin : run.panel_columns;
    const uint16_t* weights = run.weights + row * run.columns + begin;
    __m512 sums[kGemvTokensMax];
#pragma GCC unroll 3
    for (uint64_t token = 0; token < kGemvTokensMax; ++token) sums[token] = _mm512_setzero_ps();
    uint64_t column = 0;
    for (; column + kBlock <= width; column += kBlock) {
      __builtin_prefetch(weights + column + kPrefetchWeights, 0, 0);
      __builtin_prefetch(weights + column + kPrefetchWeights + 32, 0, 0);
      multiply_block(sums, _mm512_loadu_si512(weights + column), _mm512_loadu_si512(weights + column + 32), x + column,
                     stride, tokens);
    }
    if (column < width) {  // the padded block
      const uint64_t mask = (1ull << (width - column)) - 1;
      multiply_block(sums, _mm512_maskz_loadu_epi16((__mmask32)mask, weights + column),
                     _mm512_maskz_loadu_epi16((__mmask32)(mask >> 32), weights + column + 32), x + column, stride,
                     tokens);
    }
    const __m128 four = sum_of_lanes(sums[0], sums[1], sums[2], sums[0]);
    alignas(16) float panel[4];
    _mm_store_ps(panel, four);
#pragma GCC unroll 3
    for (uint64_t token = 0; token < tokens; ++token) {
      float& out = run.sums[token * run.sums_stride + row];
      out = begin == 0 ? panel[token] : out + panel[token];
    }
  }
}

ZIPMOE_AVX512_CODE inline __attribute__((always_inline)) void multiply_rows(const BFloat16GemvRun& run,
                                                                            const uint64_t tokens) {
  for (uint64_t row = 0; row < run.rows; ++row) multiply_row(run, row, tokens);
}

ZIPMOE_AVX512_CODE __attribute__((noinline)) void multiply_one_token(const BFloat16GemvRun& run) {
  multiply_rows(run, 1);
}
ZIPMOE_AVX512_CODE __attribute__((noinline)) void multiply_two_tokens(const BFloat16GemvRun& run) {
  multiply_rows(run, 2);
}
ZIPMOE_AVX512_CODE __attribute__((noinline)) void multiply_three_tokens(const BFloat16GemvRun& run) {
  multiply_rows(run, 3);
}

}  // namespace

ZIPMOE_AVX512_CODE void bfloat16_gemv_avx512(const BFloat16GemvRun& run) {
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
