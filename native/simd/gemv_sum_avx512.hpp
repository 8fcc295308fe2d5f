// The end of a panel in the canonical order (gemv_kernels.hpp), for four rows at once.
#pragma once
#include "simd/avx512_intrinsics.hpp"

#include "simd/wide_code.hpp"

namespace zipmoe::simd {
namespace {

// Lane i + lane i + 8, then i + 4.
ZIPMOE_AVX512_CODE inline __attribute__((always_inline)) __m128 sum_to_four_lanes(__m512 lanes) {
  const __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(lanes), _mm512_extractf32x8_ps(lanes, 1));
  return _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
}

// The sums of the lanes of a, b, c and d, in this order.
ZIPMOE_AVX512_CODE inline __attribute__((always_inline)) __m128 sum_of_lanes(__m512 a, __m512 b, __m512 c, __m512 d) {
  const __m128 a4 = sum_to_four_lanes(a);
  const __m128 b4 = sum_to_four_lanes(b);
  const __m128 c4 = sum_to_four_lanes(c);
  const __m128 d4 = sum_to_four_lanes(d);
  // Lane i + lane i + 2 of two rows each: a0 + a2, a1 + a3, b0 + b2, b1 + b3.
  const __m128 ab = _mm_add_ps(_mm_movelh_ps(a4, b4), _mm_movehl_ps(b4, a4));
  const __m128 cd = _mm_add_ps(_mm_movelh_ps(c4, d4), _mm_movehl_ps(d4, c4));
  return _mm_add_ps(_mm_shuffle_ps(ab, cd, 0x88), _mm_shuffle_ps(ab, cd, 0xDD));
}

// The first half of the same for many tokens: lane i + lane i + 8, then i + 4. Four lanes of each row, in this order.
ZIPMOE_AVX512_CODE inline __attribute__((always_inline)) __m512 four_lanes_of_rows(__m512 a, __m512 b, __m512 c,
                                                                                   __m512 d) {
  const __m512 ab = _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xEE));
  const __m512 cd = _mm512_add_ps(_mm512_shuffle_f32x4(c, d, 0x44), _mm512_shuffle_f32x4(c, d, 0xEE));
  return _mm512_add_ps(_mm512_shuffle_f32x4(ab, cd, 0x88), _mm512_shuffle_f32x4(ab, cd, 0xDD));
}

// Lane i + lane i + 2 of two tokens' rows.
ZIPMOE_AVX512_CODE inline __attribute__((always_inline)) __m512 two_lanes_of_rows(__m512 t, __m512 u) {
  const __m512d first = _mm512_unpacklo_pd(_mm512_castps_pd(t), _mm512_castps_pd(u));
  const __m512d second = _mm512_unpackhi_pd(_mm512_castps_pd(t), _mm512_castps_pd(u));
  return _mm512_add_ps(_mm512_castpd_ps(first), _mm512_castpd_ps(second));
}

// The second half: t to w are what four_lanes_of_rows() gave for four tokens. The sums of the first token's four rows,
// then those of the second ...
ZIPMOE_AVX512_CODE inline __attribute__((always_inline)) __m512 sums_of_tokens(__m512 t, __m512 u, __m512 v, __m512 w) {
  const __m512 tu = two_lanes_of_rows(t, u);
  const __m512 vw = two_lanes_of_rows(v, w);
  const __m512 sums = _mm512_add_ps(_mm512_shuffle_ps(tu, vw, 0x88), _mm512_shuffle_ps(tu, vw, 0xDD));
  return _mm512_permutexvar_ps(_mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15), sums);
}

}  // namespace
}  // namespace zipmoe::simd
