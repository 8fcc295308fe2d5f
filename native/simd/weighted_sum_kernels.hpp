// The weighted sum of some BF16 rows. Plain C types only (see wide_code.hpp). All instruction sets give the same bits:
// every value's products are added one by one, in the order of the rows.
#pragma once
#include <stdint.h>

namespace zipmoe {

enum class InstructionSet;

namespace simd {

struct WeightedRows {
  const uint16_t* const* rows;  // BF16 [count][size]
  const float* weights;         // [count]
  uint64_t count;
  uint64_t size;
};

// out BF16 [size]: 0 + weights[0] * rows[0] + weights[1] * rows[1] ..., in fp32, rounded once, one NaN standing for
// all.
using WeightedSum = void (*)(const WeightedRows& terms, uint16_t* out);

// The instruction set must be supported by this machine.
WeightedSum weighted_sum(InstructionSet instruction_set) noexcept;

void weighted_sum_scalar(const WeightedRows& terms, uint16_t* out);

#if defined(__x86_64__)
void weighted_sum_avx2(const WeightedRows& terms, uint16_t* out);
void weighted_sum_avx512(const WeightedRows& terms, uint16_t* out);
#endif

}  // namespace simd
}  // namespace zipmoe
