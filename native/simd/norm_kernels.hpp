// The two passes of an RMS norm over BF16 rows. Plain C types only (see wide_code.hpp). All instruction sets give the
// same bits: sums in the order of compute/lane_sums.hpp, products one by one.
#pragma once
#include <stdint.h>

namespace zipmoe {

enum class InstructionSet;

namespace simd {

constexpr uint64_t kNormRows = 4;

struct NormRows {
  const uint16_t* x;  // BF16 [count][size]
  uint64_t count;     // 1 .. kNormRows
  uint64_t size;
};

struct NormKernels {
  // sums[row]: of the squares of a row.
  void (*squares)(const NormRows& rows, float* sums);
  // out BF16 [count][size]: x * factors[row] * weight, rounded once, one NaN standing for all. `weight`: BF16 [size].
  void (*scale)(const NormRows& rows, const float* factors, const uint16_t* weight, uint16_t* out);
};

// The instruction set must be supported by this machine.
const NormKernels& norm_kernels(InstructionSet instruction_set) noexcept;

void norm_squares_scalar(const NormRows& rows, float* sums);
void norm_scale_scalar(const NormRows& rows, const float* factors, const uint16_t* weight, uint16_t* out);

#if defined(__x86_64__)
void norm_squares_avx2(const NormRows& rows, float* sums);
void norm_scale_avx2(const NormRows& rows, const float* factors, const uint16_t* weight, uint16_t* out);
void norm_squares_avx512(const NormRows& rows, float* sums);
void norm_scale_avx512(const NormRows& rows, const float* factors, const uint16_t* weight, uint16_t* out);
#endif

}  // namespace simd
}  // namespace zipmoe
