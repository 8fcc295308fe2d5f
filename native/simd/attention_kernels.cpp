#include "simd/attention_kernels.hpp"

#include "simd/instruction_set.hpp"
#include "simd/kernel_choice.hpp"

namespace zipmoe::simd {

const AttentionKernels& attention_kernels(InstructionSet instruction_set) noexcept {
  static constexpr AttentionKernels scalar = {attention_scores_scalar, attention_mix_scalar};
#if defined(__x86_64__)
  static constexpr AttentionKernels avx2 = {attention_scores_avx2, attention_mix_avx2};
  static constexpr AttentionKernels avx512 = {attention_scores_avx512, attention_mix_avx512};
  return kernels_of(instruction_set, scalar, avx2, avx512);
#else
  (void)instruction_set;
  return scalar;
#endif
}

}  // namespace zipmoe::simd
