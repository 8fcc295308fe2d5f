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
#ifndef ZIPMOE_RAWPF
#define ZIPMOE_RAWPF 1024
#endif
#ifndef ZIPMOE_RAWROWS
#define ZIPMOE_RAWROWS 1
#endif
constexpr uint64_t kPrefetchWeights = ZIPMOE_RAWPF;
constexpr uint64_t kRowsAtOnce = ZIPMOE_RAWROWS;

// `rows` (1..4) and `tokens` are constants of each caller.
ZIPMOE_AVX512_CODE inline __attribute__((always_inline)) void multiply_rows(const BFloat16GemvRun& run, uint64_t first,
                                                                            const uint64_t rows,
                                                                            const uint64_t tokens) {
  const uint16_t* const weights = run.weights + first * run.columns;
  const uint64_t stride = run.inputs.stride;
  for (uint64_t begin = 0; begin < run.columns; begin += run.panel_columns) {
    const uint64_t width = run.columns - begin < run.panel_columns ? run.columns - begin : run.panel_columns;
    const uint16_t* x = run.inputs.x + begin;
    const uint16_t* w = weights + begin;
    __m512 sums[kGemvTokensMax][4];
#pragma GCC unroll 3
    for (uint64_t token = 0; token < kGemvTokensMax; ++token) {
#pragma GCC unroll 4
      for (uint64_t row = 0; row < 4; ++row) sums[token][row] = _mm512_setzero_ps();
    }
    uint64_t column = 0;
    for (; column + kBlock <= width; column += kBlock) {
#pragma GCC unroll 4
      for (uint64_t row = 0; row < rows; ++row) {
        const uint16_t* at = w + row * run.columns + column;
        __builtin_prefetch(at + kPrefetchWeights);
        __builtin_prefetch(at + kPrefetchWeights + 32);
        const __m512bh w0 = (__m512bh)_mm512_loadu_si512(at);
        const __m512bh w1 = (__m512bh)_mm512_loadu_si512(at + 32);
#pragma GCC unroll 3
        for (uint64_t token = 0; token < tokens; ++token) {
          const uint16_t* inputs = x + token * stride + column;
          sums[token][row] = _mm512_dpbf16_ps(sums[token][row], w0, (__m512bh)_mm512_load_si512(inputs));
          sums[token][row] = _mm512_dpbf16_ps(sums[token][row], w1, (__m512bh)_mm512_load_si512(inputs + 32));
        }
      }
    }
    if (column < width) {  // the padded block
      const uint64_t mask = (1ull << (width - column)) - 1;
#pragma GCC unroll 4
      for (uint64_t row = 0; row < rows; ++row) {
        const uint16_t* at = w + row * run.columns + column;
        const __m512bh w0 = (__m512bh)_mm512_maskz_loadu_epi16((__mmask32)mask, at);
        const __m512bh w1 = (__m512bh)_mm512_maskz_loadu_epi16((__mmask32)(mask >> 32), at + 32);
#pragma GCC unroll 3
        for (uint64_t token = 0; token < tokens; ++token) {
          const uint16_t* inputs = x + token * stride + column;
          sums[token][row] = _mm512_dpbf16_ps(sums[token][row], w0, (__m512bh)_mm512_load_si512(inputs));
          sums[token][row] = _mm512_dpbf16_ps(sums[token][row], w1, (__m512bh)_mm512_load_si512(inputs + 32));
        }
      }
    }
#pragma GCC unroll 3
    for (uint64_t token = 0; token < tokens; ++token) {
      float* out = run.sums + token * run.sums_stride + first;
      __m128 four = sum_of_lanes(sums[token][0], sums[token][1], sums[token][2], sums[token][3]);
      const __mmask8 written = (__mmask8)((1u << rows) - 1);
      if (begin != 0) four = _mm_add_ps(_mm_maskz_loadu_ps(written, out), four);
      _mm_mask_storeu_ps(out, written, four);
    }
  }
}

ZIPMOE_AVX512_CODE inline __attribute__((always_inline)) void multiply_all_rows(const BFloat16GemvRun& run,
                                                                                const uint64_t tokens) {
  uint64_t row = 0;
  for (; row + kRowsAtOnce <= run.rows; row += kRowsAtOnce) multiply_rows(run, row, kRowsAtOnce, tokens);
  for (; row < run.rows; ++row) multiply_rows(run, row, 1, tokens);
}

ZIPMOE_AVX512_CODE __attribute__((noinline)) void multiply_one_token(const BFloat16GemvRun& run) {
  multiply_all_rows(run, 1);
}
ZIPMOE_AVX512_CODE __attribute__((noinline)) void multiply_two_tokens(const BFloat16GemvRun& run) {
  multiply_all_rows(run, 2);
}
ZIPMOE_AVX512_CODE __attribute__((noinline)) void multiply_three_tokens(const BFloat16GemvRun& run) {
  multiply_all_rows(run, 3);
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
