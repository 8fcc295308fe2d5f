#include "simd/prompt_attention_kernels.hpp"

#include "simd/gemv_kernels.hpp"
#include "simd/instruction_set.hpp"

namespace zipmoe::simd {

PromptAttention prompt_attention(InstructionSet instruction_set) noexcept {
#if defined(__x86_64__)
  switch (gemv_instruction_set(instruction_set)) {
    case InstructionSet::scalar:
      return nullptr;
    case InstructionSet::avx2:
      return prompt_attention_avx2;
    case InstructionSet::avx512:
      return prompt_attention_avx512;
  }
#else
  (void)instruction_set;
#endif
  return nullptr;
}

}  // namespace zipmoe::simd
