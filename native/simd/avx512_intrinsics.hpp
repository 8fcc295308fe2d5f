// <immintrin.h> for the AVX-512 translation units.
#pragma once

#if defined(__GNUC__) && !defined(__clang__)
// GCC 12 warns about its own header: the undefined pass-through operand of unmasked intrinsics (GCC bug 105593).
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include <immintrin.h>
