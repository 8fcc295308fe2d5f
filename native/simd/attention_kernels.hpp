// Kernels of one head's attention over cached keys and values, for one query. Plain C types only (see wide_code.hpp).
//
// All instruction sets give the same bits. A score is the sum of 16 fp32 lanes, lane i taking the products of the
// dimensions i, i + 16, i + 32 ... in order; then lane i takes lane i + 8, i + 4, i + 2, i + 1; then it is scaled.
// Products of two BF16 values are exact in fp32. A mixed value is the fp32 sum, position after position, of weight
// times value, product and sum rounded one by one.
#pragma once
#include <stdint.h>

namespace zipmoe {

enum class InstructionSet;

namespace simd {

constexpr uint64_t kAttentionLanes = 16;

struct AttentionScoresRun {
  const uint16_t* keys;  // BF16 [positions][head_dimension]
  uint64_t positions;
  uint64_t head_dimension;  // multiple of kAttentionLanes
  const float* query;       // [head_dimension], BF16 values
  float scale;
  float* scores;  // [positions]
};

struct AttentionMixRun {
  const uint16_t* values;  // BF16 [positions][head_dimension]
  uint64_t positions;
  uint64_t head_dimension;  // multiple of kAttentionLanes
  const float* weights;     // [positions]
  float* out;               // [head_dimension], written
};

struct AttentionKernels {
  void (*scores)(const AttentionScoresRun& run);
  void (*mix)(const AttentionMixRun& run);
};

// The instruction set must be supported by this machine.
const AttentionKernels& attention_kernels(InstructionSet instruction_set) noexcept;

void attention_scores_scalar(const AttentionScoresRun& run);
void attention_mix_scalar(const AttentionMixRun& run);

#if defined(__x86_64__)
void attention_scores_avx2(const AttentionScoresRun& run);
void attention_mix_avx2(const AttentionMixRun& run);
void attention_scores_avx512(const AttentionScoresRun& run);
void attention_mix_avx512(const AttentionMixRun& run);
#endif

}  // namespace simd
}  // namespace zipmoe
