// Attention kernels for the instruction set AVX-512.
#if defined(__x86_64__)
#include "simd/wide_code.hpp"
#define ZIPMOE_VECTOR_CODE ZIPMOE_AVX512_CODE
#include "simd/attention_body.hpp"

namespace zipmoe::simd {

ZIPMOE_AVX512_CODE void attention_scores_avx512(const AttentionScoresRun& run) { score(run); }
ZIPMOE_AVX512_CODE void attention_mix_avx512(const AttentionMixRun& run) { mix(run); }

}  // namespace zipmoe::simd
#endif
