// One FX3 record (64 weights) to two AVX-512 registers. For the *_avx512.cpp translation units that decode or multiply.
#pragma once
#include "simd/avx512_intrinsics.hpp"

#include "simd/fx3_record.hpp"
#include "simd/wide_code.hpp"

namespace zipmoe::simd {
namespace {

struct Fx3Constants512 {
  __m512i exponents;      // the code table, repeated: only bits 0..2 of an index may matter
  __m512i low_shifts;     // per 128-bit lane: brings the lane's two low code bits to bits 0 and 1
  __m512i high_rotates;   // per quadword: brings the quadword's high code bit to bit 2
  __m512i low_bits_mask;  // 3 in every byte
  __m512i escape;         // 0xFF in every byte
};

struct Fx3Weights512 {
  __m512i first;   // weights 0..31 of the block
  __m512i second;  // weights 32..63
};

ZIPMOE_AVX512_CODE inline __attribute__((always_inline)) Fx3Constants512 make_constants(const uint8_t* exponents) {
  uint64_t table;
  __builtin_memcpy(&table, exponents, sizeof table);
  Fx3Constants512 c;
  c.exponents = _mm512_set1_epi64((long long)table);
  c.low_shifts = _mm512_setr_epi32(0, 0, 0, 0, 2, 2, 2, 2, 4, 4, 4, 4, 6, 6, 6, 6);
  c.high_rotates = _mm512_setr_epi64(62, 63, 0, 1, 2, 3, 4, 5);
  c.low_bits_mask = _mm512_set1_epi8(3);
  c.escape = _mm512_set1_epi8(-1);
  return c;
}

// Reads 64 bytes at `exception` and advances it by the number of escapes of the record (0..64).
ZIPMOE_AVX512_CODE inline __attribute__((always_inline)) Fx3Weights512 decode_record(const Fx3Constants512& c,
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

}  // namespace
}  // namespace zipmoe::simd
