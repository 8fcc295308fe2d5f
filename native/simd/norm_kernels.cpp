#include "simd/norm_kernels.hpp"

#include "simd/instruction_set.hpp"
#include "simd/kernel_choice.hpp"

namespace zipmoe::simd {

const NormKernels& norm_kernels(InstructionSet instruction_set) noexcept {
  static constexpr NormKernels scalar = {norm_squares_scalar, norm_scale_scalar};
#if defined(__x86_64__)
  static constexpr NormKernels avx2 = {norm_squares_avx2, norm_scale_avx2};
  static constexpr NormKernels avx512 = {norm_squares_avx512, norm_scale_avx512};
  return kernels_of(instruction_set, scalar, avx2, avx512);
#else
  (void)instruction_set;
  return scalar;
#endif
}

}  // namespace zipmoe::simd
