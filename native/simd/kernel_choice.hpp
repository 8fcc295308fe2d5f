// Which table of kernels belongs to an instruction set.
#pragma once
#include "simd/instruction_set.hpp"

namespace zipmoe::simd {

template <typename Kernels>
const Kernels& kernels_of(InstructionSet instruction_set, const Kernels& scalar, const Kernels& avx2,
                          const Kernels& avx512) noexcept {
  switch (instruction_set) {
    case InstructionSet::scalar:
      return scalar;
    case InstructionSet::avx2:
      return avx2;
    case InstructionSet::avx512:
      return avx512;
  }
  return scalar;
}

}  // namespace zipmoe::simd
