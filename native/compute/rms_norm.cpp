#include "compute/rms_norm.hpp"

#include <cmath>
#include <vector>

#include "compute/bfloat16.hpp"
#include "compute/lane_sums.hpp"

namespace zipmoe {
void RmsNorm::apply(const float* x, uint64_t size, float* out) const {
  const float squares = sum_in_lanes(size, [&](uint64_t i) { return x[i] * x[i]; });
  const float scale = 1.0f / std::sqrt(squares / static_cast<float>(size) + epsilon);
  for (uint64_t i = 0; i < size; ++i) out[i] = x[i] * scale * bfloat16_to_float(weight[i]);
}

void rms_norm(const RmsNorm& norm, const uint16_t* x, uint64_t rows, uint64_t size, uint16_t* out) {
  std::vector<float> values(size);
  for (uint64_t row = 0; row < rows; ++row) {
    for (uint64_t i = 0; i < size; ++i) values[i] = bfloat16_to_float(x[row * size + i]);
    norm.apply(values.data(), size, values.data());
    for (uint64_t i = 0; i < size; ++i) out[row * size + i] = float_to_bfloat16(values[i]);
  }
}

}  // namespace zipmoe
