// Attention of prompts for AVX2: pairs are widened to fp32 as they are loaded, for four queries at a time.
#if defined(__x86_64__)
#include "simd/denormals_avx.hpp"
#include "simd/wide_code.hpp"
#define ZIPMOE_VECTOR_CODE ZIPMOE_AVX2_CODE
#include "simd/prompt_attention_body.hpp"

namespace zipmoe::simd {
namespace {

struct Tile {
  static constexpr uint64_t kRows = 4;
  static constexpr uint64_t kVectors = 1;

  ZIPMOE_AVX2_CODE static __attribute__((noinline)) void whole(const PairProducts& products, uint64_t row,
                                                               uint64_t vector) {
    constexpr uint64_t halves = 2;
    __m256 sums[kRows][halves];
    float* to = products.sums + row * products.sums_stride + vector * kVectorLanes;
#pragma GCC unroll 4
    for (uint64_t i = 0; i < kRows; ++i) {
#pragma GCC unroll 2
      for (uint64_t j = 0; j < halves; ++j) sums[i][j] = _mm256_loadu_ps(to + i * products.sums_stride + 8 * j);
    }
    const uint16_t* left = products.left + row * products.left_stride;
    const uint16_t* right = products.right + vector * products.right_vector_stride;
    for (uint64_t pair = 0; pair < products.pairs; ++pair, left += 2, right += products.right_pair_stride) {
      __m256 upper[halves];
      __m256 lower[halves];
#pragma GCC unroll 2
      for (uint64_t j = 0; j < halves; ++j) {
        const __m256i pairs = _mm256_loadu_si256((const __m256i*)(right + 16 * j));
        upper[j] = _mm256_castsi256_ps(_mm256_and_si256(pairs, _mm256_set1_epi32((int)0xFFFF0000)));
        lower[j] = _mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16));
      }
#pragma GCC unroll 4
      for (uint64_t i = 0; i < kRows; ++i) {
        uint32_t two;
        __builtin_memcpy(&two, left + i * products.left_stride, sizeof two);
        const __m256 second = _mm256_castsi256_ps(_mm256_set1_epi32((int)(two & 0xFFFF0000)));
        const __m256 first = _mm256_castsi256_ps(_mm256_set1_epi32((int)(two << 16)));
#pragma GCC unroll 2
        for (uint64_t j = 0; j < halves; ++j) {
          sums[i][j] = _mm256_fmadd_ps(second, upper[j], sums[i][j]);
          sums[i][j] = _mm256_fmadd_ps(first, lower[j], sums[i][j]);
        }
      }
    }
#pragma GCC unroll 4
    for (uint64_t i = 0; i < kRows; ++i) {
#pragma GCC unroll 2
      for (uint64_t j = 0; j < halves; ++j) _mm256_storeu_ps(to + i * products.sums_stride + 8 * j, sums[i][j]);
    }
  }
  ZIPMOE_AVX2_CODE static inline void narrow(const PairProducts& products, uint64_t row, uint64_t vector) {
    whole(products, row, vector);
  }
};

ZIPMOE_AVX2_CODE __attribute__((noinline)) void attend(const PromptAttentionRun& run) { attend_in_blocks<Tile>(run); }

}  // namespace

ZIPMOE_AVX2_CODE void prompt_attention_avx2(const PromptAttentionRun& run) {
  const unsigned before = _mm_getcsr();
  _mm_setcsr(kFlushDenormals);
  attend(run);
  _mm_setcsr(before);
}

}  // namespace zipmoe::simd
#endif
