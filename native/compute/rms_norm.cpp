#include "compute/rms_norm.hpp"

#include <algorithm>
#include <cmath>

#include "compute/bfloat16.hpp"
#include "compute/lane_sums.hpp"

namespace zipmoe {

float RmsNorm::factor(float squares, uint64_t size) const {
  return 1.0f / std::sqrt(squares / static_cast<float>(size) + epsilon);
}

void RmsNorm::apply(const float* x, uint64_t size, float* out) const {
  const float squares = sum_in_lanes(size, [&](uint64_t i) { return x[i] * x[i]; });
  const float scale = factor(squares, size);
  for (uint64_t i = 0; i < size; ++i) out[i] = x[i] * scale * bfloat16_to_float(weight[i]);
}

void rms_norm(const RmsNorm& norm, const uint16_t* x, uint64_t rows, uint64_t size, uint16_t* out,
              const simd::NormKernels& kernels) {
  float factors[simd::kNormRows];
  for (uint64_t row = 0; row < rows; row += simd::kNormRows) {
    const simd::NormRows some{x + row * size, std::min(simd::kNormRows, rows - row), size};
    kernels.squares(some, factors);
    for (uint64_t i = 0; i < some.count; ++i) factors[i] = norm.factor(factors[i], size);
    kernels.scale(some, factors, norm.weight, out + row * size);
  }
}

void rms_norm(const RmsNorm& norm, const uint16_t* x, uint64_t rows, uint64_t size, uint16_t* out,
              const simd::NormKernels& kernels, ComputeThreads& threads) {
  constexpr uint64_t task_values = 1 << 16;
  const uint64_t task_rows =
      std::max<uint64_t>(1, task_values / std::max<uint64_t>(1, size) / simd::kNormRows) * simd::kNormRows;
  threads.run(static_cast<uint32_t>((rows + task_rows - 1) / task_rows), [&](uint32_t task) {
    const uint64_t begin = task * task_rows;
    rms_norm(norm, x + begin * size, std::min(task_rows, rows - begin), size, out + begin * size, kernels);
  });
}

}  // namespace zipmoe
