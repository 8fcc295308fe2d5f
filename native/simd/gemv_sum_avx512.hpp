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

}  // namespace
}  // namespace zipmoe::simd
