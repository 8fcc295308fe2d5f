// Row-major BF16 matrix times many tokens with AVX2 and FMA: some blocks of four rows at a time are widened.
#if defined(__x86_64__)
#include "simd/denormals_avx.hpp"
#include "simd/gemm_tile_avx2.hpp"
#include "simd/gemv_kernels.hpp"
#include "simd/wide_code.hpp"

namespace zipmoe::simd {
namespace {

constexpr uint64_t kColumnsAtOnce = kBlocksAtOnce * kFx3BlockWeights;

// Widens `columns` (at most kColumnsAtOnce) weights of a row, padded with zeros to whole blocks; returns the steps.
ZIPMOE_AVX2_CODE inline __attribute__((always_inline)) uint64_t widen_columns(const uint16_t* weights, uint64_t columns,
                                                                              uint64_t row, WideRows& rows) {
  const uint64_t steps = (columns + kFx3BlockWeights - 1) / kFx3BlockWeights * kFx3BlockWeights / kStepColumns;
  if (columns % kFx3BlockWeights == 0) {
    widen(weights, steps, row, rows);
  } else {
    alignas(32) uint16_t padded[kColumnsAtOnce] = {};
    __builtin_memcpy(padded, weights, columns * sizeof(uint16_t));
    widen(padded, steps, row, rows);
  }
  return steps;
}

ZIPMOE_AVX2_CODE __attribute__((noinline)) void multiply_groups(const BFloat16GemvRun& run) {
  WideRows rows;
  AllLanes lanes;
  for (uint64_t first = 0; first < run.rows; first += kFx3GroupRows) {
    const uint64_t present = run.rows - first < kFx3GroupRows ? run.rows - first : kFx3GroupRows;
    GemvInputs inputs = run.inputs;
    const uint16_t* x = inputs.x;
    for (uint64_t panel = 0; panel < run.columns; panel += run.panel_columns, x += inputs.panel_step) {
      const uint64_t end = run.columns - panel < run.panel_columns ? run.columns : panel + run.panel_columns;
      clear(lanes, run.inputs.tokens);
      for (uint64_t begin = panel; begin < end; begin += kColumnsAtOnce) {
        const uint64_t columns = end - begin < kColumnsAtOnce ? end - begin : kColumnsAtOnce;
        uint64_t steps = 0;
        for (uint64_t row = 0; row < kFx3GroupRows; ++row) {
          // Rows behind the last one are copies of it, whose sums nobody looks at.
          const uint64_t from = first + (row < present ? row : present - 1);
          const uint16_t* next =
              run.weights + from * run.columns + (begin + columns < run.columns ? begin + columns : 0);
          for (uint64_t column = 0; column < kColumnsAtOnce; column += 32) __builtin_prefetch(next + column);
          steps = widen_columns(run.weights + from * run.columns + begin, columns, row, rows);
        }
        inputs.x = x + (begin - panel);
        multiply_all_tokens(rows, steps, inputs, lanes);
      }
      add_panel(lanes, run.inputs.tokens, present, run.sums + first, run.sums_stride, panel > 0);
    }
  }
}

}  // namespace

ZIPMOE_AVX2_CODE void bfloat16_gemm_avx2(const BFloat16GemvRun& run) {
  const unsigned environment = _mm_getcsr();
  _mm_setcsr(kFlushDenormals);
  multiply_groups(run);
  _mm_setcsr(environment);
}

}  // namespace zipmoe::simd
#endif
