#include "compute/elementwise.hpp"

#include <stdexcept>

#include "compute/bfloat16.hpp"

namespace zipmoe {

void add(std::span<const uint16_t> a, std::span<const uint16_t> b, uint16_t* out) {
  if (a.size() != b.size()) throw std::invalid_argument("rows that are added have the same shape");
  // Also where `out` is `a` or `b`, no value is read after its place was written.
#pragma GCC ivdep
  for (size_t i = 0; i < a.size(); ++i) {
    out[i] = float_to_bfloat16(bfloat16_to_float(a[i]) + bfloat16_to_float(b[i]));
  }
}

void scale(uint16_t factor, std::span<uint16_t> values) {
  const float by = bfloat16_to_float(factor);
  for (uint16_t& value : values) value = float_to_bfloat16(by * bfloat16_to_float(value));
}

}  // namespace zipmoe
