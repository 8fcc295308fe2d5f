#include "compute/rms_norm.hpp"

#include <cmath>
#include <vector>

#include "compute/bfloat16.hpp"

namespace zipmoe {
namespace {

constexpr uint64_t kLanes = 8;  // partial sums; the compiler makes vectors of them

float sum_of_squares(const float* x, uint64_t size) {
  float lanes[kLanes] = {};
  uint64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) {
    for (uint64_t lane = 0; lane < kLanes; ++lane) lanes[lane] += x[i + lane] * x[i + lane];
  }
  for (uint64_t lane = 0; i < size; ++i, ++lane) lanes[lane] += x[i] * x[i];
  for (uint64_t half = kLanes / 2; half > 0; half /= 2) {
    for (uint64_t lane = 0; lane < half; ++lane) lanes[lane] += lanes[lane + half];
  }
  return lanes[0];
}

}  // namespace

void RmsNorm::apply(const float* x, uint64_t size, float* out) const {
  const float scale = 1.0f / std::sqrt(sum_of_squares(x, size) / static_cast<float>(size) + epsilon);
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
