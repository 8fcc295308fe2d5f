// The canonical order of accumulation (gemv_kernels.hpp) with AVX2 and FMA: two registers are the 16 lanes. Under
// kFlushDenormals (denormals_avx.hpp).
#pragma once
#include <immintrin.h>
#include <stdint.h>

#include "simd/wide_code.hpp"

namespace zipmoe::simd {
namespace {

constexpr uint64_t kStepColumns = 32;

struct Lanes256 {
  __m256 low;   // lanes 0..7
  __m256 high;  // lanes 8..15
};

// Each 32-bit element holds two BF16 values: the lower one is the even column.
ZIPMOE_AVX2_CODE inline __attribute__((always_inline)) __m256 even_columns(__m256i words) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(words, 16));
}
ZIPMOE_AVX2_CODE inline __attribute__((always_inline)) __m256 odd_columns(__m256i words) {
  return _mm256_castsi256_ps(_mm256_and_si256(words, _mm256_set1_epi32((int)0xFFFF0000)));
}

// The inputs of 32 columns, as two registers each of even and odd ones.
struct Inputs256 {
  __m256 even_low, even_high, odd_low, odd_high;
};

ZIPMOE_AVX2_CODE inline __attribute__((always_inline)) Inputs256 load_inputs(const uint16_t* x) {
  const __m256i low = _mm256_load_si256((const __m256i*)x);
  const __m256i high = _mm256_load_si256((const __m256i*)(x + 16));
  return {even_columns(low), even_columns(high), odd_columns(low), odd_columns(high)};
}

ZIPMOE_AVX2_CODE inline __attribute__((always_inline)) void multiply_add(Lanes256& lanes, const uint16_t* weights,
                                                                         const Inputs256& inputs) {
  const __m256i low = _mm256_loadu_si256((const __m256i_u*)weights);
  const __m256i high = _mm256_loadu_si256((const __m256i_u*)(weights + 16));
  lanes.low = _mm256_fmadd_ps(odd_columns(low), inputs.odd_low, lanes.low);
  lanes.high = _mm256_fmadd_ps(odd_columns(high), inputs.odd_high, lanes.high);
  lanes.low = _mm256_fmadd_ps(even_columns(low), inputs.even_low, lanes.low);
  lanes.high = _mm256_fmadd_ps(even_columns(high), inputs.even_high, lanes.high);
}

ZIPMOE_AVX2_CODE inline __attribute__((always_inline)) float sum_of_lanes(const Lanes256& lanes) {
  const __m256 eight = _mm256_add_ps(lanes.low, lanes.high);
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

}  // namespace
}  // namespace zipmoe::simd
