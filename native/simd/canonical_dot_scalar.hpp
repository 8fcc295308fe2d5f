// The canonical order of accumulation (gemv_kernels.hpp) in portable C++, exact to the bit on every machine: it needs
// double precision with rounding to nearest even, and no fused multiply-add (std::fma without the instruction takes
// fifty times as long).
#pragma once
#include <bit>
#include <cmath>
#include <cstdint>

#include "simd/gemv_kernels.hpp"

namespace zipmoe::simd {

// Denormals become zeros of their sign.
inline float bfloat16_to_float_flushed(uint16_t word) {
  const uint32_t kept = (word & 0x7F80u) == 0 ? 0x8000u : 0xFFFFu;
  return std::bit_cast<float>((word & kept) << 16);
}

inline float add_flushed(float a, float b) {
  const float sum = a + b;  // where it is denormal it is exact, hence tiny
  const uint32_t bits = std::bit_cast<uint32_t>(sum);
  return std::bit_cast<float>((bits & 0x7F800000u) == 0 ? bits & 0x80000000u : bits);
}

// w * x + sum with one rounding, flushed. `w` and `x` are BF16 values, none of the three is denormal.
inline float fused_multiply_add_flushed(float w, float x, float sum) {
  // The product is exact (16 bits). The addition is made exact by rounding to odd: of the two doubles around the true
  // sum the one with an odd last place is taken, and rounding that once more to float, which has less than half the
  // digits, gives what one rounding would have given.
  const double product = static_cast<double>(w) * static_cast<double>(x);
  const double addend = sum;
  const double rounded = product + addend;
  const double addend_part = rounded - product;
  const double error = (product - (rounded - addend_part)) + (addend - addend_part);
  const bool inexact = (error > 0) | (error < 0);  // false also for NaN, which infinite operands leave
  uint64_t bits = std::bit_cast<uint64_t>(rounded);
  const uint64_t step = (error > 0) == (rounded > 0) ? 1 : ~uint64_t{0};
  bits += inexact && (bits & 1) == 0 ? step : 0;
  const double odd = std::bit_cast<double>(bits);
  // Tiny after rounding to 24 digits: below the midpoint of the smallest normal number and its neighbour.
  constexpr double tiny = 0x1p-126 - 0x1p-151;
  const float result = static_cast<float>(odd);
  const uint32_t sign = std::bit_cast<uint32_t>(result) & 0x80000000u;
  return std::fabs(odd) < tiny ? std::bit_cast<float>(sign) : result;
}

// The sum over one panel: `columns` (a multiple of 32) weights and inputs.
inline float canonical_dot(const uint16_t* weights, const uint16_t* x, uint64_t columns) {
  float lanes[kGemvLanes] = {};
  for (uint64_t column = 0; column < columns; column += 2 * kGemvLanes) {
    for (uint64_t parity : {uint64_t{1}, uint64_t{0}}) {
      for (uint64_t lane = 0; lane < kGemvLanes; ++lane) {
        const uint64_t at = column + 2 * lane + parity;
        lanes[lane] = fused_multiply_add_flushed(bfloat16_to_float_flushed(weights[at]),
                                                 bfloat16_to_float_flushed(x[at]), lanes[lane]);
      }
    }
  }
  for (uint64_t half = kGemvLanes / 2; half > 0; half /= 2) {
    for (uint64_t lane = 0; lane < half; ++lane) lanes[lane] = add_flushed(lanes[lane], lanes[lane + half]);
  }
  return lanes[0];
}

}  // namespace zipmoe::simd
