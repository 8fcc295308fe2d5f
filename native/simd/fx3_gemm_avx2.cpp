// FX3 matrix times many tokens with AVX2 and FMA: some blocks of a row group at a time are decoded and widened.
#if defined(__x86_64__)
#include "simd/fx3_record_avx2.hpp"

#include "simd/denormals_avx.hpp"
#include "simd/gemm_tile_avx2.hpp"
#include "simd/gemv_kernels.hpp"
#include "simd/wide_code.hpp"

namespace zipmoe::simd {
namespace {

constexpr uint64_t kRowSlots = kBlocksAtOnce * kFx3BlockWeights + 16;  // decoding may write one behind the last weight

ZIPMOE_AVX2_CODE __attribute__((noinline)) void multiply_groups(const Fx3GemvRun& run) {
  const Fx3Constants256 constants = make_constants(run.exponents);
  const uint8_t* const exceptions_end = run.exceptions + run.exception_count;
  const uint8_t* record = run.records;
  alignas(32) uint16_t decoded[kFx3GroupRows][kRowSlots];
  WideRows rows;
  AllLanes lanes;
  for (uint64_t group = 0; group < run.groups; ++group) {
    uint32_t index;
    __builtin_memcpy(&index, run.index + sizeof index * group, sizeof index);
    const uint8_t* exception = run.exceptions + (index < run.exception_count ? index : run.exception_count);
    clear(lanes, run.inputs.tokens);
    for (uint64_t first = 0; first < run.blocks; first += kBlocksAtOnce) {
      const uint64_t blocks = run.blocks - first < kBlocksAtOnce ? run.blocks - first : kBlocksAtOnce;
      for (uint64_t block = 0; block < blocks; ++block) {
        for (uint64_t row = 0; row < kFx3GroupRows; ++row, record += kFx3RecordBytes) {
          exception = decode_record(constants, record, exception, decoded[row] + block * kFx3BlockWeights);
          if (exception > exceptions_end) exception = exceptions_end;  // hostile records
        }
      }
      const uint64_t steps = blocks * kFx3BlockWeights / kStepColumns;
      for (uint64_t row = 0; row < kFx3GroupRows; ++row) widen(decoded[row], steps, row, rows);
      GemvInputs inputs = run.inputs;
      inputs.x += first * kFx3BlockWeights;
      multiply_all_tokens(rows, steps, inputs, lanes);
    }
    add_panel(lanes, run.inputs.tokens, kFx3GroupRows, run.sums + group * kFx3GroupRows, run.sums_stride, run.add);
  }
}

}  // namespace

ZIPMOE_AVX2_CODE void fx3_gemm_avx2(const Fx3GemvRun& run) {
  const unsigned environment = _mm_getcsr();
  _mm_setcsr(kFlushDenormals);
  multiply_groups(run);
  _mm_setcsr(environment);
}

}  // namespace zipmoe::simd
#endif
