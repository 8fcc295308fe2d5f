// FX3 decoding with AVX-512 VBMI2: four records (64 weights each) per step, exceptions expanded in register.
#if defined(__x86_64__)
#include "simd/fx3_record_avx512.hpp"
#include "simd/kernels.hpp"
#include "simd/wide_code.hpp"

namespace zipmoe::simd {
namespace {

ZIPMOE_AVX512_CODE inline __attribute__((always_inline)) void store(const Fx3Weights512& weights, uint16_t* out) {
  _mm512_storeu_si512(out, weights.first);
  _mm512_storeu_si512(out + 32, weights.second);
}

ZIPMOE_AVX512_CODE inline __attribute__((always_inline)) void store_columns(const Fx3Weights512& weights,
                                                                            uint64_t columns, uint16_t* out) {
  const uint64_t mask = columns >= 64 ? ~0ull : (1ull << columns) - 1;
  _mm512_mask_storeu_epi16(out, (__mmask32)mask, weights.first);
  _mm512_mask_storeu_epi16(out + 32, (__mmask32)(mask >> 32), weights.second);
}

}  // namespace

ZIPMOE_AVX512_CODE void fx3_decode_avx512(const Fx3Run& run) {
  const Fx3Constants512 constants = make_constants(run.exponents);
  const uint8_t* const exceptions_end = run.exceptions + run.exception_count;
  const uint64_t stride = run.out_stride;
  constexpr uint64_t block_bytes = kFx3GroupRows * kFx3RecordBytes;
  const uint8_t* record = run.records;
  for (uint64_t group = 0; group < run.groups; ++group) {
    uint32_t index;
    __builtin_memcpy(&index, run.index + sizeof index * group, sizeof index);
    const uint8_t* exception = run.exceptions + (index < run.exception_count ? index : run.exception_count);
    uint16_t* out = run.out + group * kFx3GroupRows * stride;
    for (uint64_t block = 0; block < run.blocks; ++block, out += kFx3BlockWeights) {
      const bool whole = block + 1 < run.blocks || run.last_block_columns == kFx3BlockWeights;
      if (whole && (uint64_t)(exceptions_end - exception) >= kFx3EscapesPerBlockMax) {
        // Hardware prefetchers stop at page borders; eight blocks ahead was the best distance measured (5 % gained).
        for (uint64_t byte = 0; byte < block_bytes; byte += 64) __builtin_prefetch(record + 8 * block_bytes + byte);
        store(decode_record(constants, record, exception), out);
        store(decode_record(constants, record + kFx3RecordBytes, exception), out + stride);
        store(decode_record(constants, record + 2 * kFx3RecordBytes, exception), out + 2 * stride);
        store(decode_record(constants, record + 3 * kFx3RecordBytes, exception), out + 3 * stride);
      } else {  // near the end of the exceptions, or a block that is not whole: stay inside whatever the records say
        const uint64_t columns = whole ? kFx3BlockWeights : run.last_block_columns;
        for (uint64_t row = 0; row < kFx3GroupRows; ++row) {
          store_columns(decode_record(constants, record + row * kFx3RecordBytes, exception), columns,
                        out + row * stride);
          if (exception > exceptions_end) exception = exceptions_end;
        }
      }
      record += block_bytes;
    }
  }
}

}  // namespace zipmoe::simd
#endif
