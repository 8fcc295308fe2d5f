// One FX3 record (64 weights) with AVX2: half a record per register, exceptions patched into the result without
// branches that depend on the data (mispredicted ones would cost more than the rest of the decoding). For the
// *_avx2.cpp translation units that decode or multiply.
#pragma once
#include <immintrin.h>

#include "simd/fx3_record.hpp"
#include "simd/wide_code.hpp"

namespace zipmoe::simd {
namespace {

struct Fx3Constants256 {
  __m256i exponents_low;   // exponents of codes 0..3 in both lanes
  __m256i exponents_high;  // exponents of codes 4..7
};

struct Fx3HalfRecord256 {
  __m256i first;     // 16 weights from the lanes' low bytes
  __m256i second;    // 16 weights from the lanes' high bytes
  uint32_t escapes;  // bit p: storage position p of this half is an escape
};

ZIPMOE_AVX2_CODE inline __attribute__((always_inline)) __m256i rotate_right_1(__m256i words) {
  return _mm256_or_si256(_mm256_srli_epi16(words, 1), _mm256_slli_epi16(words, 15));
}

// low_shifts: per 128-bit lane, brings the lane's two low code bits to bits 0 and 1 of each byte.
// high_shifts: per quadword, brings the quadword's high code bit to bit 7, which selects the upper table.
ZIPMOE_AVX2_CODE inline __attribute__((always_inline)) Fx3HalfRecord256 decode_half(const Fx3Constants256& c,
                                                                                    const uint8_t* sm_bytes,
                                                                                    __m256i low_bits, __m256i high_bits,
                                                                                    __m256i low_shifts,
                                                                                    __m256i high_shifts) {
  const __m256i low = _mm256_and_si256(_mm256_srlv_epi32(low_bits, low_shifts), _mm256_set1_epi8(3));
  const __m256i high = _mm256_sllv_epi64(high_bits, high_shifts);
  const __m256i exponents =
      _mm256_blendv_epi8(_mm256_shuffle_epi8(c.exponents_low, low), _mm256_shuffle_epi8(c.exponents_high, low), high);
  const __m256i sign_mantissa = _mm256_loadu_si256((const __m256i_u*)sm_bytes);
  Fx3HalfRecord256 half;
  half.first = rotate_right_1(_mm256_unpacklo_epi8(sign_mantissa, exponents));
  half.second = rotate_right_1(_mm256_unpackhi_epi8(sign_mantissa, exponents));
  half.escapes = (uint32_t)_mm256_movemask_epi8(_mm256_cmpeq_epi8(exponents, _mm256_set1_epi8(-1)));
  return half;
}

constexpr uint64_t kNowhere = kFx3BlockWeights;  // a slot behind the weights, for patches that are not needed

// Weight of each storage position, and of position 64, which stands for none.
const uint8_t kWeightOfPosition[kFx3BlockWeights + 1] = {
    0,  1,  2,  3,  4,  5,  6,  7,  32, 33, 34, 35, 36, 37, 38, 39, 8,  9,  10, 11, 12,      13,
    14, 15, 40, 41, 42, 43, 44, 45, 46, 47, 16, 17, 18, 19, 20, 21, 22, 23, 48, 49, 50,      51,
    52, 53, 54, 55, 24, 25, 26, 27, 28, 29, 30, 31, 56, 57, 58, 59, 60, 61, 62, 63, kNowhere};

// Gives the first of `escapes` its exponent and removes it from the set; harmless when the set is empty.
ZIPMOE_AVX2_CODE inline __attribute__((always_inline)) void patch(uint64_t& escapes, const uint8_t* record,
                                                                  uint8_t exponent, uint16_t* weights) {
  const uint64_t position = _tzcnt_u64(escapes);  // 64 when there is none
  const uint32_t sign_mantissa = record[position];
  weights[kWeightOfPosition[position]] = (uint16_t)(sign_mantissa << 15 | (uint32_t)exponent << 7 | sign_mantissa >> 1);
  escapes = _blsr_u64(escapes);
}

// Decodes to weights[0..63], and may write weights[kNowhere]. Reads at most 64 bytes at `exception`; returns it behind
// the consumed ones.
ZIPMOE_AVX2_CODE inline __attribute__((always_inline)) const uint8_t* decode_record(const Fx3Constants256& c,
                                                                                    const uint8_t* record,
                                                                                    const uint8_t* exception,
                                                                                    uint16_t* weights) {
  long long high_word;
  __builtin_memcpy(&high_word, record + kFx3HighBitsOffset, sizeof high_word);
  const __m256i low_bits = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i_u*)(record + kFx3LowBitsOffset)));
  const __m256i high_bits = _mm256_set1_epi64x(high_word);
  const Fx3HalfRecord256 lower = decode_half(c, record, low_bits, high_bits, _mm256_setr_epi32(0, 0, 0, 0, 2, 2, 2, 2),
                                             _mm256_setr_epi64x(7, 6, 5, 4));
  const Fx3HalfRecord256 upper = decode_half(c, record + 32, low_bits, high_bits,
                                             _mm256_setr_epi32(4, 4, 4, 4, 6, 6, 6, 6), _mm256_setr_epi64x(3, 2, 1, 0));
  _mm256_store_si256((__m256i*)weights, lower.first);
  _mm256_store_si256((__m256i*)(weights + 16), upper.first);
  _mm256_store_si256((__m256i*)(weights + 32), lower.second);
  _mm256_store_si256((__m256i*)(weights + 48), upper.second);
  uint64_t escapes = lower.escapes | (uint64_t)upper.escapes << 32;
  const uint64_t count = (uint64_t)_mm_popcnt_u64(escapes);
  // Most records have at most three escapes, so three are patched whether they exist or not.
  patch(escapes, record, exception[0], weights);
  patch(escapes, record, exception[1], weights);
  patch(escapes, record, exception[2], weights);
  for (uint64_t i = 3; i < count; ++i) patch(escapes, record, exception[i], weights);
  return exception + count;
}

ZIPMOE_AVX2_CODE inline __attribute__((always_inline)) __m256i table_of_four(const uint8_t* exponents) {
  int four;
  __builtin_memcpy(&four, exponents, sizeof four);
  return _mm256_set1_epi32(four);
}

ZIPMOE_AVX2_CODE inline __attribute__((always_inline)) Fx3Constants256 make_constants(const uint8_t* exponents) {
  return {table_of_four(exponents), table_of_four(exponents + 4)};
}

}  // namespace
}  // namespace zipmoe::simd
