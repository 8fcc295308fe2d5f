// The part of XXH3 that goes through all bytes, with wide instructions. Plain C types only (wide_code.hpp).
#pragma once
#include <stdint.h>

#if defined(__x86_64__)
namespace zipmoe::simd {

// How far ahead of the bytes at hand memory is fetched: those of a record that the disk has just written are in no
// cache (docs/results/checksums.md).
constexpr int kChecksumPrefetchBytes = 6144;

// As XXH3_64bits_update of xxHash; `state` is its XXH3_state_t, which is the same for all instruction sets.
void xxh3_update_avx2(void* state, const uint8_t* bytes, uint64_t count);

}  // namespace zipmoe::simd
#endif
