#include "simd/gemv_kernels.hpp"

#include "simd/instruction_set.hpp"
#include "simd/kernel_choice.hpp"

namespace zipmoe::simd {

InstructionSet gemv_instruction_set(InstructionSet instruction_set) noexcept {
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (instruction_set == InstructionSet::avx512 && __builtin_cpu_supports("avx512bf16") == 0) {
    return InstructionSet::avx2;
  }
#endif
  return instruction_set;
}

const GemvKernels& gemv_kernels(InstructionSet instruction_set) noexcept {
  static constexpr GemvKernels scalar = {
      fx3_gemv_scalar, bfloat16_gemv_scalar, fx3_gemv_scalar, bfloat16_gemv_scalar, 0, nullptr, nullptr, gate_scalar};
#if defined(__x86_64__)
  static constexpr GemvKernels avx2 = {fx3_gemv_avx2, bfloat16_gemv_avx2, fx3_gemm_avx2, bfloat16_gemm_avx2, 0, nullptr,
                                       nullptr,       gate_avx2};
  static constexpr GemvKernels avx512 = {fx3_gemv_avx512,      bfloat16_gemv_avx512, fx3_gemm_avx512,
                                         bfloat16_gemm_avx512, kUnpackedTokensMin,   fx3_unpack_avx512,
                                         unpacked_gemm_avx512, gate_avx512};
  return kernels_of(gemv_instruction_set(instruction_set), scalar, avx2, avx512);
#else
  (void)instruction_set;
  return scalar;
#endif
}

}  // namespace zipmoe::simd
