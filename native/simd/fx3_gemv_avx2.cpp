// FX3 matrix-vector product with AVX2 and FMA: some blocks of a row group are decoded to a small buffer and multiplied
// from there, once per token. Multiplying in register would wait for the patches of the exceptions.
#if defined(__x86_64__)
#include "simd/fx3_record_avx2.hpp"

#include "simd/canonical_dot_avx2.hpp"
#include "simd/denormals_avx.hpp"
#include "simd/gemv_kernels.hpp"
#include "simd/wide_code.hpp"

namespace zipmoe::simd {
namespace {

constexpr uint64_t kBlocksAtOnce = 8;
constexpr uint64_t kRowSlots = kBlocksAtOnce * kFx3BlockWeights + 16;  // decoding may write one behind the last weight

struct Buffer {
  alignas(32) uint16_t weights[kFx3GroupRows][kRowSlots];
};

// Adds the products of `columns` decoded weights of each row to its lanes.
ZIPMOE_AVX2_CODE inline __attribute__((always_inline)) void multiply_buffer(const Buffer& buffer, uint64_t columns,
                                                                            const uint16_t* x,
                                                                            Lanes256 (&lanes)[kFx3GroupRows]) {
  Lanes256 row0 = lanes[0];
  Lanes256 row1 = lanes[1];
  Lanes256 row2 = lanes[2];
  Lanes256 row3 = lanes[3];
  for (uint64_t column = 0; column < columns; column += kStepColumns) {
    const Inputs256 inputs = load_inputs(x + column);
    multiply_add(row0, buffer.weights[0] + column, inputs);
    multiply_add(row1, buffer.weights[1] + column, inputs);
    multiply_add(row2, buffer.weights[2] + column, inputs);
    multiply_add(row3, buffer.weights[3] + column, inputs);
  }
  lanes[0] = row0;
  lanes[1] = row1;
  lanes[2] = row2;
  lanes[3] = row3;
}

ZIPMOE_AVX2_CODE __attribute__((noinline)) void multiply_groups(const Fx3GemvRun& run) {
  const Fx3Constants256 constants = make_constants(run.exponents);
  const uint8_t* const exceptions_end = run.exceptions + run.exception_count;
  const uint8_t* record = run.records;
  Buffer buffer;
  for (uint64_t group = 0; group < run.groups; ++group) {
    uint32_t index;
    __builtin_memcpy(&index, run.index + sizeof index * group, sizeof index);
    const uint8_t* exception = run.exceptions + (index < run.exception_count ? index : run.exception_count);
    Lanes256 lanes[kGemvTokensMax][kFx3GroupRows] = {};
    for (uint64_t first = 0; first < run.blocks; first += kBlocksAtOnce) {
      const uint64_t blocks = run.blocks - first < kBlocksAtOnce ? run.blocks - first : kBlocksAtOnce;
      for (uint64_t block = 0; block < blocks; ++block) {
        for (uint64_t row = 0; row < kFx3GroupRows; ++row, record += kFx3RecordBytes) {
          exception = decode_record(constants, record, exception, buffer.weights[row] + block * kFx3BlockWeights);
          if (exception > exceptions_end) exception = exceptions_end;  // hostile records
        }
      }
      for (uint64_t token = 0; token < run.inputs.tokens; ++token) {
        const uint16_t* x = run.inputs.x + token * run.inputs.stride + first * kFx3BlockWeights;
        multiply_buffer(buffer, blocks * kFx3BlockWeights, x, lanes[token]);
      }
    }
    for (uint64_t token = 0; token < run.inputs.tokens; ++token) {
      float* sums = run.sums + token * run.sums_stride + group * kFx3GroupRows;
      for (uint64_t row = 0; row < kFx3GroupRows; ++row) {
        const float sum = sum_of_lanes(lanes[token][row]);
        sums[row] = run.add ? sums[row] + sum : sum;
      }
    }
  }
}

}  // namespace

ZIPMOE_AVX2_CODE void fx3_gemv_avx2(const Fx3GemvRun& run) {
  const unsigned environment = _mm_getcsr();
  _mm_setcsr(kFlushDenormals);
  multiply_groups(run);
  _mm_setcsr(environment);
}

}  // namespace zipmoe::simd
#endif
