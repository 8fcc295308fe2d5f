// FX3 decoding with AVX-512 VBMI2: one record (64 weights) per pass of two registers, exceptions expanded in register.
#if defined(__x86_64__)
#include "simd/avx512_intrinsics.hpp"

#include "simd/fx3_record.hpp"
#include "simd/kernels.hpp"
#include "simd/wide_code.hpp"

namespace zipmoe::simd {
namespace {

struct Constants {
  __m512i exponents;      // the code table, repeated: only bits 0..2 of an index may matter
  __m512i low_shifts;     // per 128-bit lane: brings the lane's two low code bits to bits 0 and 1
  __m512i high_rotates;   // per quadword: brings the quadword's high code bit to bit 2
  __m512i low_bits_mask;  // 3 in every byte
  __m512i escape;         // 0xFF in every byte
};

struct Weights {
  __m512i first;   // weights 0..31 of the block
  __m512i second;  // weights 32..63
};

ZIPMOE_AVX512_CODE inline __attribute__((always_inline)) Constants make_constants(const uint8_t* exponents) {
  uint64_t table;
  __builtin_memcpy(&table, exponents, sizeof table);
  Constants c;
  c.exponents = _mm512_set1_epi64((long long)table);
  c.low_shifts = _mm512_setr_epi32(0, 0, 0, 0, 2, 2, 2, 2, 4, 4, 4, 4, 6, 6, 6, 6);
  c.high_rotates = _mm512_setr_epi64(62, 63, 0, 1, 2, 3, 4, 5);
  c.low_bits_mask = _mm512_set1_epi8(3);
  c.escape = _mm512_set1_epi8(-1);
  return c;
}

// Reads 64 bytes at `exception` and advances it by the number of escapes of the record (0..64).
ZIPMOE_AVX512_CODE inline __attribute__((always_inline)) Weights decode_record(const Constants& c,
                                                                               const uint8_t* record,
                                                                               const uint8_t*& exception) {
  uint64_t high_bits;
  __builtin_memcpy(&high_bits, record + kFx3HighBitsOffset, sizeof high_bits);
  const __m512i low = _mm512_srlv_epi32(
      _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i_u*)(record + kFx3LowBitsOffset))), c.low_shifts);
  const __m512i high = _mm512_rorv_epi64(_mm512_set1_epi64((long long)high_bits), c.high_rotates);
  const __m512i codes = _mm512_ternarylogic_epi64(low, high, c.low_bits_mask, 0xE4);  // mask ? low : high
  __m512i exponents = _mm512_permutexvar_epi8(codes, c.exponents);
  const __mmask64 escapes = _mm512_cmpeq_epi8_mask(exponents, c.escape);
  __m512i next_exceptions = _mm512_loadu_si512(exception);
  // Keeps the compiler from folding the load into the expansion, whose memory form is microcoded on Zen 4.
  __asm__("" : "+v"(next_exceptions));
  exponents = _mm512_mask_expand_epi8(exponents, escapes, next_exceptions);
  exception += _mm_popcnt_u64(escapes);
  const __m512i sign_mantissa = _mm512_loadu_si512(record);
  const __m512i first = _mm512_unpacklo_epi8(sign_mantissa, exponents);
  const __m512i second = _mm512_unpackhi_epi8(sign_mantissa, exponents);
  return {_mm512_shrdi_epi16(first, first, 1), _mm512_shrdi_epi16(second, second, 1)};
}

ZIPMOE_AVX512_CODE inline __attribute__((always_inline)) void store(const Weights& weights, uint16_t* out) {
  _mm512_storeu_si512(out, weights.first);
  _mm512_storeu_si512(out + 32, weights.second);
}

ZIPMOE_AVX512_CODE inline __attribute__((always_inline)) void store_columns(const Weights& weights, uint64_t columns,
                                                                            uint16_t* out) {
  const uint64_t mask = columns >= 64 ? ~0ull : (1ull << columns) - 1;
  _mm512_mask_storeu_epi16(out, (__mmask32)mask, weights.first);
  _mm512_mask_storeu_epi16(out + 32, (__mmask32)(mask >> 32), weights.second);
}

}  // namespace

ZIPMOE_AVX512_CODE void fx3_decode_avx512(const Fx3Run& run) {
  const Constants constants = make_constants(run.exponents);
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
