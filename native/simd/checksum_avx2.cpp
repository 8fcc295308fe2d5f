// xxHash's XXH3 for the instruction set AVX2, whose vectors it does best with.
#if defined(__x86_64__)
#include "simd/checksum_kernels.hpp"

#include "simd/wide_code.hpp"

// XXH_INLINE_ALL leaves nothing outside of the function below, given optimisation (CMakeLists.txt).
#define XXH_INLINE_ALL
#define XXH_PREFETCH_DIST zipmoe::simd::kChecksumPrefetchBytes
#include <xxhash.h>

namespace zipmoe::simd {

ZIPMOE_AVX2_CODE __attribute__((flatten)) void xxh3_update_avx2(void* state, const uint8_t* bytes, uint64_t count) {
  static_assert(XXH_VECTOR == XXH_AVX2);
  XXH3_64bits_update((XXH3_state_t*)state, bytes, count);
}

}  // namespace zipmoe::simd
#endif
