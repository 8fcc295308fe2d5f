// FX3 matrix-vector product in portable C++: every row group is decoded to a buffer that stays in the first-level
// cache.
#include <array>

#include "simd/canonical_dot_scalar.hpp"
#include "simd/fx3_record.hpp"
#include "simd/gemv_kernels.hpp"
#include "simd/kernels.hpp"

namespace zipmoe::simd {

void fx3_gemv_scalar(const Fx3GemvRun& run) {
  const uint64_t columns = run.blocks * kFx3BlockWeights;
  alignas(64) std::array<uint16_t, kFx3GroupRows * kFx3PanelColumnsMax> weights;
  for (uint64_t group = 0; group < run.groups; ++group) {
    fx3_decode_scalar(Fx3Run{
        .records = run.records + group * run.blocks * kFx3GroupRows * kFx3RecordBytes,
        .index = run.index + group * sizeof(uint32_t),
        .exceptions = run.exceptions,
        .exception_count = run.exception_count,
        .exponents = run.exponents,
        .groups = 1,
        .blocks = run.blocks,
        .last_block_columns = kFx3BlockWeights,
        .out = weights.data(),
        .out_stride = columns,
    });
    for (uint64_t token = 0; token < run.inputs.tokens; ++token) {
      const uint16_t* x = run.inputs.x + token * run.inputs.stride;
      float* sums = run.sums + token * run.sums_stride + group * kFx3GroupRows;
      for (uint64_t row = 0; row < kFx3GroupRows; ++row) {
        const float sum = canonical_dot(weights.data() + row * columns, x, columns);
        sums[row] = run.add ? add_flushed(sums[row], sum) : sum;
      }
    }
  }
}

}  // namespace zipmoe::simd
