// Causal attention of a block of queries of one head over the keys of a prompt. Plain C types only (see wide_code.hpp).
//
// Keys and values lie packed in pairs, as the products want them: of keys the two values of neighbouring dimensions, of
// values those of neighbouring positions. Positions are taken in blocks of kPromptKeys, with the largest score so far
// as reference of the exponentials (Milakov and Gimelshein, arXiv 1805.02867; Dao et al., arXiv 2205.14135).
//
// All instruction sets give the same bits. Products of pairs follow `vdpbf16ps` (docs/compute.md, "The canonical
// order"): the upper, then the lower value of each pair is multiplied with and added to one fp32 sum, rounded once
// each, denormals being zeros. Everything else is in fp32, products and sums rounded one by one.
#pragma once
#include <stdint.h>

namespace zipmoe {

enum class InstructionSet;

namespace simd {

constexpr uint64_t kPromptQueries = 24;    // of a block
constexpr uint64_t kPromptKeys = 64;       // of a block
constexpr uint64_t kPromptKeyVector = 16;  // keys side by side

struct PromptAttentionRun {
  const uint16_t* queries;  // BF16 [kPromptQueries][head_dimension], zeros behind the last one
  uint64_t first_position;  // of the first query: it attends to the keys 0 .. first_position
  uint64_t query_count;     // 1 .. kPromptQueries
  // Both padded with zeros to whole blocks of kPromptKeys positions.
  const uint16_t* keys;     // BF16 [positions / kPromptKeyVector][head_dimension / 2][kPromptKeyVector][2]
  const uint16_t* values;   // BF16 [positions / 2][head_dimension][2]
  uint64_t head_dimension;  // multiple of 16
  float scale;
  float* sums;          // [kPromptQueries][head_dimension]: scratch
  uint16_t* out;        // BF16, `head_dimension` values of each query
  uint64_t out_stride;  // values from one query to the next
};

using PromptAttention = void (*)(const PromptAttentionRun& run);

// Null where there is none: portable code is slower than torch's. The instruction set must be supported by this
// machine.
PromptAttention prompt_attention(InstructionSet instruction_set) noexcept;

#if defined(__x86_64__)
void prompt_attention_avx2(const PromptAttentionRun& run);
void prompt_attention_avx512(const PromptAttentionRun& run);
#endif

}  // namespace simd
}  // namespace zipmoe
