// Matrix-vector product of a row-major BF16 matrix in portable C++.
#include <algorithm>
#include <array>
#include <cstring>

#include "simd/canonical_dot_scalar.hpp"
#include "simd/fx3_record.hpp"
#include "simd/gemv_kernels.hpp"

namespace zipmoe::simd {
namespace {

// The sum over the columns of a panel of one row; the last block is padded with zeros.
float panel_dot(const uint16_t* weights, const uint16_t* x, uint64_t columns) {
  if (columns % kFx3BlockWeights == 0) return canonical_dot(weights, x, columns);
  std::array<uint16_t, kFx3PanelColumnsMax> padded{};
  std::memcpy(padded.data(), weights, columns * sizeof(uint16_t));
  return canonical_dot(padded.data(), x, (columns + kFx3BlockWeights - 1) / kFx3BlockWeights * kFx3BlockWeights);
}

}  // namespace

void bfloat16_gemv_scalar(const BFloat16GemvRun& run) {
  for (uint64_t token = 0; token < run.inputs.tokens; ++token) {
    for (uint64_t row = 0; row < run.rows; ++row) {
      const uint16_t* weights = run.weights + row * run.columns;
      const uint16_t* x = run.inputs.x + token * run.inputs.stride;
      float& sum = run.sums[token * run.sums_stride + row];
      for (uint64_t begin = 0; begin < run.columns; begin += run.panel_columns, x += run.inputs.panel_step) {
        const float panel = panel_dot(weights + begin, x, std::min(run.columns - begin, run.panel_columns));
        sum = begin == 0 ? panel : add_flushed(sum, panel);
      }
    }
  }
}

}  // namespace zipmoe::simd
