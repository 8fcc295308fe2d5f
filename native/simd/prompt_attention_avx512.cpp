// Attention of prompts for AVX-512 with BF16: 24 sums in registers, each step four loads of pairs for 24 products.
#if defined(__x86_64__)
#include "simd/avx512_intrinsics.hpp"

#include "simd/denormals_avx.hpp"
#include "simd/wide_code.hpp"
#define ZIPMOE_VECTOR_CODE ZIPMOE_AVX512_CODE
#include "simd/prompt_attention_body.hpp"

namespace zipmoe::simd {
namespace {

struct Tile {
  static constexpr uint64_t kRows = 6;
  static constexpr uint64_t kVectors = 4;

  ZIPMOE_AVX512_CODE static __attribute__((noinline)) void whole(const PairProducts& products, uint64_t row,
                                                                 uint64_t vector) {
    multiply(products, row, vector, kVectors);
  }
  ZIPMOE_AVX512_CODE static __attribute__((noinline)) void narrow(const PairProducts& products, uint64_t row,
                                                                  uint64_t vector) {
    multiply(products, row, vector, 1);
  }

 private:
  // `vectors` is a constant of each caller.
  ZIPMOE_AVX512_CODE static inline __attribute__((always_inline)) void multiply(const PairProducts& products,
                                                                                uint64_t row, uint64_t vector,
                                                                                const uint64_t vectors) {
    __m512 sums[kRows][kVectors];
    float* to = products.sums + row * products.sums_stride + vector * kVectorLanes;
#pragma GCC unroll 6
    for (uint64_t i = 0; i < kRows; ++i) {
#pragma GCC unroll 4
      for (uint64_t j = 0; j < vectors; ++j) {
        sums[i][j] = _mm512_loadu_ps(to + i * products.sums_stride + j * kVectorLanes);
      }
    }
    const uint16_t* left = products.left + row * products.left_stride;
    const uint16_t* right = products.right + vector * products.right_vector_stride;
    for (uint64_t pair = 0; pair < products.pairs; ++pair, left += 2, right += products.right_pair_stride) {
      __m512bh pairs[kVectors];
#pragma GCC unroll 4
      for (uint64_t j = 0; j < vectors; ++j) {
        pairs[j] = (__m512bh)_mm512_loadu_si512(right + j * products.right_vector_stride);
      }
#pragma GCC unroll 6
      for (uint64_t i = 0; i < kRows; ++i) {
        int32_t two;
        __builtin_memcpy(&two, left + i * products.left_stride, sizeof two);
        const __m512bh same = (__m512bh)_mm512_set1_epi32(two);
#pragma GCC unroll 4
        for (uint64_t j = 0; j < vectors; ++j) sums[i][j] = _mm512_dpbf16_ps(sums[i][j], same, pairs[j]);
      }
    }
#pragma GCC unroll 6
    for (uint64_t i = 0; i < kRows; ++i) {
#pragma GCC unroll 4
      for (uint64_t j = 0; j < vectors; ++j) {
        _mm512_storeu_ps(to + i * products.sums_stride + j * kVectorLanes, sums[i][j]);
      }
    }
  }
};

ZIPMOE_AVX512_CODE __attribute__((noinline)) void attend(const PromptAttentionRun& run) { attend_in_blocks<Tile>(run); }

}  // namespace

ZIPMOE_AVX512_CODE void prompt_attention_avx512(const PromptAttentionRun& run) {
  const unsigned before = _mm_getcsr();
  _mm_setcsr(kFlushDenormals);
  attend(run);
  _mm_setcsr(before);
}

}  // namespace zipmoe::simd
#endif
