// FX3 decoding with AVX2: half a record (32 weights) per register, exceptions patched into the result.
#if defined(__x86_64__)
#include <immintrin.h>

#include "simd/fx3_record.hpp"
#include "simd/kernels.hpp"
#include "simd/wide_code.hpp"

namespace zipmoe::simd {
namespace {

struct Constants {
  __m256i exponents_low;   // exponents of codes 0..3 in both lanes
  __m256i exponents_high;  // exponents of codes 4..7
};

struct Half {
  __m256i first;     // 16 weights from the lanes' low bytes
  __m256i second;    // 16 weights from the lanes' high bytes
  uint32_t escapes;  // bit p: storage position p of this half is an escape
};

ZIPMOE_AVX2_CODE inline __attribute__((always_inline)) __m256i rotate_right_1(__m256i words) {
  return _mm256_or_si256(_mm256_srli_epi16(words, 1), _mm256_slli_epi16(words, 15));
}

// low_shifts: per 128-bit lane, brings the lane's two low code bits to bits 0 and 1 of each byte.
// high_shifts: per quadword, brings the quadword's high code bit to bit 7, which selects the upper table.
ZIPMOE_AVX2_CODE inline __attribute__((always_inline)) Half decode_half(const Constants& c, const uint8_t* sm_bytes,
                                                                        __m256i low_bits, __m256i high_bits,
                                                                        __m256i low_shifts, __m256i high_shifts) {
  const __m256i low = _mm256_and_si256(_mm256_srlv_epi32(low_bits, low_shifts), _mm256_set1_epi8(3));
  const __m256i high = _mm256_sllv_epi64(high_bits, high_shifts);
  const __m256i exponents =
      _mm256_blendv_epi8(_mm256_shuffle_epi8(c.exponents_low, low), _mm256_shuffle_epi8(c.exponents_high, low), high);
  const __m256i sign_mantissa = _mm256_loadu_si256((const __m256i_u*)sm_bytes);
  Half half;
  half.first = rotate_right_1(_mm256_unpacklo_epi8(sign_mantissa, exponents));
  half.second = rotate_right_1(_mm256_unpackhi_epi8(sign_mantissa, exponents));
  half.escapes = (uint32_t)_mm256_movemask_epi8(_mm256_cmpeq_epi8(exponents, _mm256_set1_epi8(-1)));
  return half;
}

ZIPMOE_AVX2_CODE inline __attribute__((always_inline)) void patch(uint64_t& escapes, const uint8_t* record,
                                                                  uint8_t exponent, uint16_t* out, uint16_t* nowhere) {
  const uint64_t position = _tzcnt_u64(escapes);  // 64 when there is none
  const uint32_t sign_mantissa = record[position];
  uint16_t* target = out + (32 * ((position >> 3) & 1) + 8 * (position >> 4) + (position & 7));
  target = escapes != 0 ? target : nowhere;
  *target = (uint16_t)(sign_mantissa << 15 | (uint32_t)exponent << 7 | sign_mantissa >> 1);
  escapes = _blsr_u64(escapes);
}

// Reads at most 64 bytes at `exception`; returns it behind the consumed ones.
ZIPMOE_AVX2_CODE inline __attribute__((always_inline)) const uint8_t* decode_record(const Constants& c,
                                                                                    const uint8_t* record,
                                                                                    const uint8_t* exception,
                                                                                    uint16_t* out) {
  long long high_word;
  __builtin_memcpy(&high_word, record + kFx3HighBitsOffset, sizeof high_word);
  const __m256i low_bits = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i_u*)(record + kFx3LowBitsOffset)));
  const __m256i high_bits = _mm256_set1_epi64x(high_word);
  const Half lower = decode_half(c, record, low_bits, high_bits, _mm256_setr_epi32(0, 0, 0, 0, 2, 2, 2, 2),
                                 _mm256_setr_epi64x(7, 6, 5, 4));
  const Half upper = decode_half(c, record + 32, low_bits, high_bits, _mm256_setr_epi32(4, 4, 4, 4, 6, 6, 6, 6),
                                 _mm256_setr_epi64x(3, 2, 1, 0));
  _mm256_storeu_si256((__m256i_u*)out, lower.first);
  _mm256_storeu_si256((__m256i_u*)(out + 16), upper.first);
  _mm256_storeu_si256((__m256i_u*)(out + 32), lower.second);
  _mm256_storeu_si256((__m256i_u*)(out + 48), upper.second);
  uint64_t escapes = lower.escapes | (uint64_t)upper.escapes << 32;
  const uint64_t count = (uint64_t)_mm_popcnt_u64(escapes);
  // Most records have at most three escapes. Patching three without asking is cheaper than a mispredicted branch.
  uint16_t nowhere;
  patch(escapes, record, exception[0], out, &nowhere);
  patch(escapes, record, exception[1], out, &nowhere);
  patch(escapes, record, exception[2], out, &nowhere);
  for (uint64_t i = 3; i < count; ++i) patch(escapes, record, exception[i], out, &nowhere);
  return exception + count;
}

ZIPMOE_AVX2_CODE inline __attribute__((always_inline)) __m256i table_of_four(const uint8_t* exponents) {
  int four;
  __builtin_memcpy(&four, exponents, sizeof four);
  return _mm256_set1_epi32(four);
}

}  // namespace

ZIPMOE_AVX2_CODE void fx3_decode_avx2(const Fx3Run& run) {
  const Constants constants = {table_of_four(run.exponents), table_of_four(run.exponents + 4)};
  const uint8_t* const exceptions_end = run.exceptions + run.exception_count;
  const uint8_t* record = run.records;
  for (uint64_t group = 0; group < run.groups; ++group) {
    uint32_t index;
    __builtin_memcpy(&index, run.index + sizeof index * group, sizeof index);
    const uint8_t* exception = run.exceptions + (index < run.exception_count ? index : run.exception_count);
    uint16_t* out = run.out + group * kFx3GroupRows * run.out_stride;
    for (uint64_t block = 0; block < run.blocks; ++block, out += kFx3BlockWeights) {
      const bool whole = block + 1 < run.blocks || run.last_block_columns == kFx3BlockWeights;
      for (uint64_t row = 0; row < kFx3GroupRows; ++row, record += kFx3RecordBytes) {
        uint16_t* target = out + row * run.out_stride;
        if (whole) {
          exception = decode_record(constants, record, exception, target);
        } else {
          uint16_t weights[kFx3BlockWeights];
          exception = decode_record(constants, record, exception, weights);
          __builtin_memcpy(target, weights, run.last_block_columns * sizeof(uint16_t));
        }
        if (exception > exceptions_end) exception = exceptions_end;  // hostile records
      }
    }
  }
}

}  // namespace zipmoe::simd
#endif
