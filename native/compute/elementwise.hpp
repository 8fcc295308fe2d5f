// Sums and products of BF16 values, each rounded once: what lies between the parts of a layer.
#pragma once
#include <cstdint>
#include <span>

namespace zipmoe {

// out = a + b, value by value, as many as there are in `a`; `out` may be one of them. Throws std::invalid_argument for
// different sizes.
void add(std::span<const uint16_t> a, std::span<const uint16_t> b, uint16_t* out);

// values = factor * values.
void scale(uint16_t factor, std::span<uint16_t> values);

}  // namespace zipmoe
