// Root-mean-square normalisation of BF16 rows (Zhang and Sennrich, arXiv 1910.07467), in one portable order of sums.
#pragma once
#include <cstdint>

namespace zipmoe {

// out = x * weight / sqrt(mean(x^2) + epsilon), in fp32; `x` and `out` [size] may be the same.
struct RmsNorm {
  const uint16_t* weight = nullptr;  // BF16 [size]; none: no normalisation at all
  float epsilon = 0.0f;

  void apply(const float* x, uint64_t size, float* out) const;
};

// The same for BF16 rows, rounded to nearest even at the end: x and out BF16 [rows][size].
void rms_norm(const RmsNorm& norm, const uint16_t* x, uint64_t rows, uint64_t size, uint16_t* out);

}  // namespace zipmoe
