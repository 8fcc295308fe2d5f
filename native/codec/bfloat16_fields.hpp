// The two byte planes of a BF16 matrix: e = exponent, sm = mantissa << 1 | sign. bf16 = rotate_right16(e << 8 | sm, 1).
#pragma once
#include <cstdint>
#include <span>

#include "simd/instruction_set.hpp"

namespace zipmoe {

// All spans of a function have the same length, else std::invalid_argument. The planes must not overlap the weights.
void split(std::span<const uint16_t> weights, std::span<uint8_t> exponent, std::span<uint8_t> sign_mantissa);

// The second plane alone.
void keep_sign_mantissa(std::span<const uint16_t> weights, std::span<uint8_t> sign_mantissa);

// The inverse of split(). `exponent` may be the upper half of `out`, otherwise nothing may overlap.
void recombine(std::span<const uint8_t> exponent, std::span<const uint8_t> sign_mantissa, std::span<uint16_t> out,
               InstructionSet instruction_set);

}  // namespace zipmoe
