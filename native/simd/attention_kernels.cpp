#include "simd/attention_kernels.hpp"

#include "simd/instruction_set.hpp"

namespace zipmoe::simd {

const AttentionKernels& attention_kernels(InstructionSet instruction_set) noexcept {
  static constexpr AttentionKernels scalar = {attention_scores_scalar, attention_mix_scalar};
#if defined(__x86_64__)
  static constexpr AttentionKernels avx2 = {attention_scores_avx2, attention_mix_avx2};
  static constexpr AttentionKernels avx512 = {attention_scores_avx512, attention_mix_avx512};
  switch (instruction_set) {
    case InstructionSet::scalar:
      return scalar;
    case InstructionSet::avx2:
      return avx2;
    case InstructionSet::avx512:
      return avx512;
  }
#else
  (void)instruction_set;
#endif
  return scalar;
}

}  // namespace zipmoe::simd
