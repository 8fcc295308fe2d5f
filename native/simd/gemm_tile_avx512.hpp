// Products of four rows of weights with many tokens: the weights lie unpacked in the first-level cache, tokens go by in
// tiles whose sums fill the registers. For the *_gemm_avx512.cpp translation units.
#pragma once
#include "simd/avx512_intrinsics.hpp"

#include "simd/fx3_record.hpp"
#include "simd/gemm_tiles.hpp"
#include "simd/gemv_kernels.hpp"
#include "simd/gemv_sum_avx512.hpp"
#include "simd/wide_code.hpp"

namespace zipmoe::simd {
namespace {

// What comes from memory next: its lines are fetched while the tiles keep the arithmetic units busy.
class Upcoming {
 public:
  ZIPMOE_AVX512_CODE inline __attribute__((always_inline)) Upcoming(const void* bytes, uint64_t count, uint64_t steps)
      : next_((const uint8_t*)bytes), end_(next_ + count), lines_((count / kCacheLine + steps) / steps) {}

  // One of the steps.
  ZIPMOE_AVX512_CODE inline __attribute__((always_inline)) void fetch() {
    if (next_ >= end_) return;
    for (uint64_t line = 0; line < lines_; ++line, next_ += kCacheLine) __builtin_prefetch(next_);
  }

 private:
  static constexpr uint64_t kCacheLine = 64;

  const uint8_t* next_;
  const uint8_t* end_;
  uint64_t lines_;  // of a step
};

ZIPMOE_AVX512_CODE inline __attribute__((always_inline)) void store_sum(const TileOutput& output, uint64_t token,
                                                                        __m128 four) {
  float* out = output.sums + token * output.stride;
  _mm_storeu_ps(out, output.add ? _mm_add_ps(_mm_loadu_ps(out), four) : four);
}

// The end of a panel, four tokens at a time. `tokens` is a constant of each caller.
ZIPMOE_AVX512_CODE inline __attribute__((always_inline)) void store_sums(
    const __m512 (&sums)[kTileTokensMax][kFx3GroupRows], const TileOutput& output, const uint64_t tokens) {
  __m512 lanes[kTileTokensMax];
#pragma GCC unroll 6
  for (uint64_t token = 0; token < tokens; ++token) {
    lanes[token] = four_lanes_of_rows(sums[token][0], sums[token][1], sums[token][2], sums[token][3]);
  }
#pragma GCC unroll 2
  for (uint64_t first = 0; first < tokens; first += 4) {
    const uint64_t last = tokens - 1;
    // Where there are no four left, the last one takes the places of those that are missing.
    const __m512 four =
        sums_of_tokens(lanes[first], lanes[first + 1 < last ? first + 1 : last],
                       lanes[first + 2 < last ? first + 2 : last], lanes[first + 3 < last ? first + 3 : last]);
    store_sum(output, first, _mm512_castps512_ps128(four));
    if (first + 1 < tokens) store_sum(output, first + 1, _mm512_extractf32x4_ps(four, 1));
    if (first + 2 < tokens) store_sum(output, first + 2, _mm512_extractf32x4_ps(four, 2));
    if (first + 3 < tokens) store_sum(output, first + 3, _mm512_extractf32x4_ps(four, 3));
  }
}

// `tokens` is a constant of each caller: 24 sums, 4 weights and an input are in registers.
ZIPMOE_AVX512_CODE inline __attribute__((always_inline)) void multiply_tile(const FourRows& rows,
                                                                            const TileInputs& inputs,
                                                                            const TileOutput& output,
                                                                            Upcoming& upcoming, const uint64_t tokens) {
  __m512 sums[kTileTokensMax][kFx3GroupRows];
#pragma GCC unroll 6
  for (uint64_t token = 0; token < tokens; ++token) {
#pragma GCC unroll 4
    for (uint64_t row = 0; row < kFx3GroupRows; ++row) sums[token][row] = _mm512_setzero_ps();
  }
  const uint16_t* weights = rows.weights;
  const uint16_t* x = inputs.x;
  Upcoming next = upcoming;  // a copy, which stays in registers
  for (uint64_t block = 0; block < rows.blocks; ++block, weights += kFourRowsBlock, x += kFx3BlockWeights) {
    next.fetch();
#pragma GCC unroll 2
    for (uint64_t half = 0; half < kFx3BlockWeights; half += 32) {
      __m512bh w[kFx3GroupRows];
#pragma GCC unroll 4
      for (uint64_t row = 0; row < kFx3GroupRows; ++row) {
        w[row] = (__m512bh)_mm512_load_si512(weights + row * kFx3BlockWeights + half);
      }
#pragma GCC unroll 6
      for (uint64_t token = 0; token < tokens; ++token) {
        const __m512bh input = (__m512bh)_mm512_load_si512(x + token * inputs.stride + half);
#pragma GCC unroll 4
        for (uint64_t row = 0; row < kFx3GroupRows; ++row) {
          sums[token][row] = _mm512_dpbf16_ps(sums[token][row], w[row], input);
        }
      }
    }
  }
  upcoming = next;
  store_sums(sums, output, tokens);
}

ZIPMOE_AVX512_CODE __attribute__((noinline)) void multiply_one(const FourRows& rows, const TileInputs& inputs,
                                                               const TileOutput& output, Upcoming& upcoming) {
  multiply_tile(rows, inputs, output, upcoming, 1);
}
ZIPMOE_AVX512_CODE __attribute__((noinline)) void multiply_two(const FourRows& rows, const TileInputs& inputs,
                                                               const TileOutput& output, Upcoming& upcoming) {
  multiply_tile(rows, inputs, output, upcoming, 2);
}
ZIPMOE_AVX512_CODE __attribute__((noinline)) void multiply_three(const FourRows& rows, const TileInputs& inputs,
                                                                 const TileOutput& output, Upcoming& upcoming) {
  multiply_tile(rows, inputs, output, upcoming, 3);
}
ZIPMOE_AVX512_CODE __attribute__((noinline)) void multiply_four(const FourRows& rows, const TileInputs& inputs,
                                                                const TileOutput& output, Upcoming& upcoming) {
  multiply_tile(rows, inputs, output, upcoming, 4);
}
ZIPMOE_AVX512_CODE __attribute__((noinline)) void multiply_five(const FourRows& rows, const TileInputs& inputs,
                                                                const TileOutput& output, Upcoming& upcoming) {
  multiply_tile(rows, inputs, output, upcoming, 5);
}
ZIPMOE_AVX512_CODE __attribute__((noinline)) void multiply_six(const FourRows& rows, const TileInputs& inputs,
                                                               const TileOutput& output, Upcoming& upcoming) {
  multiply_tile(rows, inputs, output, upcoming, 6);
}

// A tile of 1 to 6 tokens.
ZIPMOE_AVX512_CODE inline __attribute__((always_inline)) void multiply_tokens(const FourRows& rows,
                                                                              const TileInputs& inputs,
                                                                              const TileOutput& output,
                                                                              Upcoming& upcoming, uint64_t tokens) {
  switch (tokens) {
    case 1:
      multiply_one(rows, inputs, output, upcoming);
      break;
    case 2:
      multiply_two(rows, inputs, output, upcoming);
      break;
    case 3:
      multiply_three(rows, inputs, output, upcoming);
      break;
    case 4:
      multiply_four(rows, inputs, output, upcoming);
      break;
    case 5:
      multiply_five(rows, inputs, output, upcoming);
      break;
    default:
      multiply_six(rows, inputs, output, upcoming);
  }
}

// All tokens, in tiles of nearly the same size. `upcoming`: in rows.blocks * tile_count(inputs.tokens) steps.
ZIPMOE_AVX512_CODE inline __attribute__((always_inline)) void multiply_all_tokens(const FourRows& rows,
                                                                                  const GemvInputs& inputs,
                                                                                  TileOutput output,
                                                                                  Upcoming upcoming) {
  TileInputs tile{inputs.x, inputs.stride};
  uint64_t left = inputs.tokens;
  for (uint64_t number = tile_count(inputs.tokens); number > 0; --number) {
    const uint64_t tokens = (left + number - 1) / number;
    multiply_tokens(rows, tile, output, upcoming, tokens);
    tile.x += tokens * inputs.stride;
    output.sums += tokens * output.stride;
    left -= tokens;
  }
}

}  // namespace
}  // namespace zipmoe::simd
