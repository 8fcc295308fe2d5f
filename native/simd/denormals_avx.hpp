// The floating-point environment of the AVX2 and AVX-512 kernels.
#pragma once
#include <immintrin.h>

namespace zipmoe::simd {

// Rounding to nearest even, no exception unmasked, denormal operands and results are zeros. Arithmetic must not be
// inlined beside a change of the control register, which compilers do not order with it: change, call, restore.
constexpr unsigned kFlushDenormals = 0x9FC0;

}  // namespace zipmoe::simd
