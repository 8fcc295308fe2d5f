// Root-mean-square normalisation of BF16 rows (Zhang and Sennrich, arXiv 1910.07467), in one portable order of sums.
#pragma once
#include <cstdint>

#include "compute/compute_threads.hpp"
#include "simd/norm_kernels.hpp"

namespace zipmoe {

// out = x * weight / sqrt(mean(x^2) + epsilon), in fp32; `x` and `out` [size] may be the same.
struct RmsNorm {
  const uint16_t* weight = nullptr;  // BF16 [size]; none: no normalisation at all
  float epsilon = 0.0f;

  void apply(const float* x, uint64_t size, float* out) const;
  // 1 / sqrt(mean + epsilon), from the sum of the squares.
  float factor(float squares, uint64_t size) const;
};

// The same for BF16 rows, rounded to nearest even at the end: x and out BF16 [rows][size]. The same bits on every
// instruction set and for every number of rows; in the caller's floating-point environment.
void rms_norm(const RmsNorm& norm, const uint16_t* x, uint64_t rows, uint64_t size, uint16_t* out,
              const simd::NormKernels& kernels);

// From so many values on, several threads are faster: one needs some tens of microseconds for them.
inline constexpr uint64_t kNormValuesForThreads = 1 << 17;

// On several threads, each in the default floating-point environment.
void rms_norm(const RmsNorm& norm, const uint16_t* x, uint64_t rows, uint64_t size, uint16_t* out,
              const simd::NormKernels& kernels, ComputeThreads& threads);

}  // namespace zipmoe
