// FX3 decoding with AVX2, one record after the other into a small buffer, from there to the output.
#if defined(__x86_64__)
#include "simd/fx3_record_avx2.hpp"
#include "simd/kernels.hpp"
#include "simd/wide_code.hpp"

namespace zipmoe::simd {
namespace {

constexpr uint64_t kSlots = kNowhere + 16;  // keeps the next row's weights aligned

ZIPMOE_AVX2_CODE inline __attribute__((always_inline)) void copy_block(const uint16_t (*weights)[kSlots], uint16_t* out,
                                                                       uint64_t out_stride) {
  for (uint64_t row = 0; row < kFx3GroupRows; ++row) {
    for (uint64_t i = 0; i < kFx3BlockWeights; i += 16) {
      _mm256_storeu_si256((__m256i_u*)(out + row * out_stride + i),
                          _mm256_load_si256((const __m256i*)(weights[row] + i)));
    }
  }
}

}  // namespace

ZIPMOE_AVX2_CODE void fx3_decode_avx2(const Fx3Run& run) {
  const Fx3Constants256 constants = make_constants(run.exponents);
  const uint8_t* const exceptions_end = run.exceptions + run.exception_count;
  const uint8_t* record = run.records;
  for (uint64_t group = 0; group < run.groups; ++group) {
    uint32_t index;
    __builtin_memcpy(&index, run.index + sizeof index * group, sizeof index);
    const uint8_t* exception = run.exceptions + (index < run.exception_count ? index : run.exception_count);
    uint16_t* out = run.out + group * kFx3GroupRows * run.out_stride;
    // A block is copied to the output only after the next one has been decoded: by then its patches, narrower than the
    // loads of the copy, have left the store buffer.
    alignas(32) uint16_t weights[2][kFx3GroupRows][kSlots];
    for (uint64_t block = 0; block < run.blocks; ++block) {
      for (uint64_t row = 0; row < kFx3GroupRows; ++row, record += kFx3RecordBytes) {
        exception = decode_record(constants, record, exception, weights[block % 2][row]);
        if (exception > exceptions_end) exception = exceptions_end;  // hostile records
      }
      if (block > 0) copy_block(weights[(block - 1) % 2], out + (block - 1) * kFx3BlockWeights, run.out_stride);
    }
    const uint64_t last = run.blocks - 1;
    out += last * kFx3BlockWeights;
    if (run.last_block_columns == kFx3BlockWeights) {
      copy_block(weights[last % 2], out, run.out_stride);
    } else {
      for (uint64_t row = 0; row < kFx3GroupRows; ++row) {
        __builtin_memcpy(out + row * run.out_stride, weights[last % 2][row], run.last_block_columns * sizeof(uint16_t));
      }
    }
  }
}

}  // namespace zipmoe::simd
#endif
