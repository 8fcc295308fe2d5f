// Vectors of 16 values, which the compiler lays out for the instruction set of the translation unit that includes this.
// ZIPMOE_VECTOR_CODE marks the functions (wide_code.hpp).
#pragma once
#include <stdint.h>

namespace zipmoe::simd {
namespace {

constexpr uint64_t kVectorLanes = 16;

typedef float Floats16 __attribute__((vector_size(64)));
typedef uint32_t Words16 __attribute__((vector_size(64)));
typedef uint16_t Halves16 __attribute__((vector_size(32)));
typedef float Floats8 __attribute__((vector_size(32)));
typedef float Floats4 __attribute__((vector_size(16)));

static_assert(sizeof(Floats16) == kVectorLanes * sizeof(float));

ZIPMOE_VECTOR_CODE inline __attribute__((always_inline)) void widen(const uint16_t* values, Floats16& out) {
  Halves16 halves;
  __builtin_memcpy(&halves, values, sizeof halves);
  const Words16 words = __builtin_convertvector(halves, Words16) << 16;
  out = (Floats16)words;
}

ZIPMOE_VECTOR_CODE inline __attribute__((always_inline)) float sum_of_lanes(const Floats16& lanes) {
  const Floats8 eight = __builtin_shufflevector(lanes, lanes, 0, 1, 2, 3, 4, 5, 6, 7) +
                        __builtin_shufflevector(lanes, lanes, 8, 9, 10, 11, 12, 13, 14, 15);
  const Floats4 four =
      __builtin_shufflevector(eight, eight, 0, 1, 2, 3) + __builtin_shufflevector(eight, eight, 4, 5, 6, 7);
  return (four[0] + four[2]) + (four[1] + four[3]);
}

// To BF16, to the nearest, ties to even, in the upper halves; every NaN becomes one.
ZIPMOE_VECTOR_CODE inline __attribute__((always_inline)) void round_to_upper_halves(const Floats16& values,
                                                                                    Words16& out) {
  const Words16 bits = (Words16)values;
  const Words16 rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000u;
  const Words16 nan = Words16{} + 0x7FC00000u;
  out = values == values ? rounded : nan;
}

ZIPMOE_VECTOR_CODE inline __attribute__((always_inline)) void store_upper_halves(const Words16& words, uint16_t* out) {
  const Halves16 halves = __builtin_convertvector(words >> 16, Halves16);
  __builtin_memcpy(out, &halves, sizeof halves);
}

// Both ways for the single values that are left of a row.
ZIPMOE_VECTOR_CODE inline __attribute__((always_inline)) float widened(uint16_t half) {
  return __builtin_bit_cast(float, (uint32_t)half << 16);
}

ZIPMOE_VECTOR_CODE inline __attribute__((always_inline)) uint16_t rounded_to_half(float value) {
  const uint32_t bits = __builtin_bit_cast(uint32_t, value);
  return value == value ? (uint16_t)((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) : 0x7FC0;
}

}  // namespace
}  // namespace zipmoe::simd
