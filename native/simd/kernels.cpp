#include "simd/kernels.hpp"

#include "simd/instruction_set.hpp"
#include "simd/kernel_choice.hpp"

namespace zipmoe::simd {

const Kernels& kernels(InstructionSet instruction_set) {
  static constexpr Kernels scalar = {fx3_decode_scalar, recombine_scalar};
#if defined(__x86_64__)
  static constexpr Kernels avx2 = {fx3_decode_avx2, recombine_avx2};
  static constexpr Kernels avx512 = {fx3_decode_avx512, recombine_avx512};
  return kernels_of(instruction_set, scalar, avx2, avx512);
#else
  (void)instruction_set;
  return scalar;
#endif
}

}  // namespace zipmoe::simd
