// Attention kernels for the instruction set AVX2.
#if defined(__x86_64__)
#include "simd/wide_code.hpp"
#define ZIPMOE_VECTOR_CODE ZIPMOE_AVX2_CODE
#include "simd/attention_body.hpp"

namespace zipmoe::simd {

ZIPMOE_AVX2_CODE void attention_scores_avx2(const AttentionScoresRun& run) { score(run); }
ZIPMOE_AVX2_CODE void attention_mix_avx2(const AttentionMixRun& run) { mix(run); }

}  // namespace zipmoe::simd
#endif
