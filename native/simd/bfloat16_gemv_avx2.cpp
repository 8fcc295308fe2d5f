// Matrix-vector product of a row-major BF16 matrix with AVX2 and FMA.
#if defined(__x86_64__)
#include "simd/canonical_dot_avx2.hpp"
#include "simd/denormals_avx.hpp"
#include "simd/gemv_kernels.hpp"
#include "simd/wide_code.hpp"

namespace zipmoe::simd {
namespace {

constexpr uint64_t kBlock = 64;

// Adds the products of one row's columns [0, width) to its lanes.
ZIPMOE_AVX2_CODE inline __attribute__((always_inline)) Lanes256 multiply_panel(const uint16_t* weights,
                                                                               const uint16_t* x, uint64_t width) {
  Lanes256 lanes = {_mm256_setzero_ps(), _mm256_setzero_ps()};
  uint64_t column = 0;
  for (; column + kBlock <= width; column += kBlock) {
    __builtin_prefetch(weights + column + 1024);
    __builtin_prefetch(weights + column + 1024 + 32);
    multiply_add(lanes, weights + column, load_inputs(x + column));
    multiply_add(lanes, weights + column + kStepColumns, load_inputs(x + column + kStepColumns));
  }
  if (column < width) {
    alignas(32) uint16_t padded[kBlock] = {};
    __builtin_memcpy(padded, weights + column, (width - column) * sizeof(uint16_t));
    multiply_add(lanes, padded, load_inputs(x + column));
    multiply_add(lanes, padded + kStepColumns, load_inputs(x + column + kStepColumns));
  }
  return lanes;
}

ZIPMOE_AVX2_CODE __attribute__((noinline)) void multiply_rows(const BFloat16GemvRun& run) {
  for (uint64_t row = 0; row < run.rows; ++row) {
    const uint16_t* weights = run.weights + row * run.columns;
    // A row stays in the first-level cache from token to token.
    for (uint64_t token = 0; token < run.inputs.tokens; ++token) {
      const uint16_t* x = run.inputs.x + token * run.inputs.stride;
      float& out = run.sums[token * run.sums_stride + row];
      for (uint64_t begin = 0; begin < run.columns; begin += run.panel_columns) {
        const uint64_t width = run.columns - begin < run.panel_columns ? run.columns - begin : run.panel_columns;
        const float sum = sum_of_lanes(multiply_panel(weights + begin, x + begin, width));
        out = begin == 0 ? sum : out + sum;
      }
    }
  }
}

}  // namespace

ZIPMOE_AVX2_CODE void bfloat16_gemv_avx2(const BFloat16GemvRun& run) {
  const unsigned environment = _mm_getcsr();
  _mm_setcsr(kFlushDenormals);
  multiply_rows(run);
  _mm_setcsr(environment);
}

}  // namespace zipmoe::simd
#endif
