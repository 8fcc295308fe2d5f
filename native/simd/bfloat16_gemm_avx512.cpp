// Row-major BF16 matrix times many tokens with AVX-512: four rows are brought together in the first-level cache.
#if defined(__x86_64__)
#include "simd/avx512_intrinsics.hpp"

#include "simd/denormals_avx.hpp"
#include "simd/gemm_tile_avx512.hpp"
#include "simd/gemv_kernels.hpp"
#include "simd/wide_code.hpp"

namespace zipmoe::simd {
namespace {

// Copies `width` weights of a row to its place in FourRows.
ZIPMOE_AVX512_CODE inline __attribute__((always_inline)) void copy_row(const uint16_t* weights, uint64_t width,
                                                                       uint16_t* out) {
  uint64_t column = 0;
  for (; column + kFx3BlockWeights <= width; column += kFx3BlockWeights, out += kFourRowsBlock) {
    _mm512_store_si512(out, _mm512_loadu_si512(weights + column));
    _mm512_store_si512(out + 32, _mm512_loadu_si512(weights + column + 32));
  }
  if (column < width) {
    const uint64_t mask = (1ull << (width - column)) - 1;
    _mm512_store_si512(out, _mm512_maskz_loadu_epi16((__mmask32)mask, weights + column));
    _mm512_store_si512(out + 32, _mm512_maskz_loadu_epi16((__mmask32)(mask >> 32), weights + column + 32));
  }
}

ZIPMOE_AVX512_CODE __attribute__((noinline)) void multiply_groups(const BFloat16GemvRun& run) {
  alignas(64) uint16_t weights[kFx3GroupRows * kFx3PanelColumnsMax];
  const uint64_t tiles = tile_count(run.inputs.tokens);
  const uint64_t weight_count = run.rows * run.columns;
  for (uint64_t first = 0; first < run.rows; first += kFx3GroupRows) {
    GemvInputs inputs = run.inputs;
    for (uint64_t begin = 0; begin < run.columns; begin += run.panel_columns, inputs.x += inputs.panel_step) {
      const uint64_t width = run.columns - begin < run.panel_columns ? run.columns - begin : run.panel_columns;
      const uint64_t blocks = (width + kFx3BlockWeights - 1) / kFx3BlockWeights;
      for (uint64_t row = 0; row < kFx3GroupRows; ++row) {
        // Rows behind the last one are copies of it, whose sums nobody looks at.
        const uint64_t from = first + row < run.rows ? first + row : run.rows - 1;
        copy_row(run.weights + from * run.columns + begin, width, weights + row * kFx3BlockWeights);
      }
      // What comes next, as far as there is only one panel; with several it is as many weights of the next rows.
      const uint64_t next = (first + kFx3GroupRows) * run.columns + kFx3GroupRows * begin;
      const uint64_t left = next < weight_count ? weight_count - next : 0;
      const uint64_t next_count = left < kFx3GroupRows * width ? left : kFx3GroupRows * width;
      multiply_all_tokens({weights, blocks}, inputs, {run.sums + first, run.sums_stride, begin > 0},
                          Upcoming(run.weights + (left > 0 ? next : 0), next_count * sizeof(uint16_t), blocks * tiles));
    }
  }
}

}  // namespace

ZIPMOE_AVX512_CODE void bfloat16_gemm_avx512(const BFloat16GemvRun& run) {
  const unsigned environment = _mm_getcsr();
  _mm_setcsr(kFlushDenormals);
  multiply_groups(run);
  _mm_setcsr(environment);
}

}  // namespace zipmoe::simd
#endif
