// BF16 values and how the computing parts round to them.
#pragma once
#include <bit>
#include <cstdint>

namespace zipmoe {

inline float bfloat16_to_float(uint16_t word) { return std::bit_cast<float>(static_cast<uint32_t>(word) << 16); }

// To the nearest, ties to even; every NaN becomes 0x7FC0, because kernels do not agree on the bits of a NaN.
inline uint16_t float_to_bfloat16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint32_t rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
  return static_cast<uint16_t>((bits & 0x7FFFFFFF) > 0x7F800000 ? 0x7FC0u : rounded);
}

inline float round_to_bfloat16(float value) { return bfloat16_to_float(float_to_bfloat16(value)); }

// The same NaN for all.
inline float with_one_nan(float value) { return value == value ? value : std::bit_cast<float>(0x7FC00000u); }

}  // namespace zipmoe
