#include "simd/weighted_sum_kernels.hpp"

#include "simd/instruction_set.hpp"
#include "simd/kernel_choice.hpp"

namespace zipmoe::simd {

WeightedSum weighted_sum(InstructionSet instruction_set) noexcept {
#if defined(__x86_64__)
  return kernels_of<WeightedSum>(instruction_set, weighted_sum_scalar, weighted_sum_avx2, weighted_sum_avx512);
#else
  (void)instruction_set;
  return weighted_sum_scalar;
#endif
}

}  // namespace zipmoe::simd
