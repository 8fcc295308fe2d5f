// Attention kernels for the instruction set of the baseline.
#define ZIPMOE_VECTOR_CODE
#include "simd/attention_body.hpp"

namespace zipmoe::simd {

void attention_scores_scalar(const AttentionScoresRun& run) { score(run); }
void attention_mix_scalar(const AttentionMixRun& run) { mix(run); }

}  // namespace zipmoe::simd
