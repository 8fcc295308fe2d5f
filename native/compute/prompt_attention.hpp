// Causal attention of whole prompts: all new tokens of each sequence, behind none that are cached, or what the last
// ones of each see.
#pragma once
#include <cstdint>

#include "compute/attention.hpp"
#include "simd/prompt_attention_kernels.hpp"

namespace zipmoe {

struct PromptInputs {
  uint64_t sequences = 0;
  uint64_t tokens = 0;                // of each sequence
  const uint16_t* queries = nullptr;  // BF16 [sequences][query_tokens][query_heads * head_dimension]
  const uint16_t* keys = nullptr;     // BF16 [sequences][tokens][key_value_heads * head_dimension]
  const uint16_t* values = nullptr;
  RmsNorm query_norm;  // of each head, before the rotation
  RmsNorm key_norm;
  uint64_t query_tokens = tokens;  // how many of the tokens, the last ones of each sequence, attend
};

// out: BF16 [sequences][query_tokens][query_heads * head_dimension]. A token attends to itself and those before it.
// The prepared keys and the values become the first `tokens` entries of the cache, whose length is 0. The results are
// the same bits on every instruction set with a kernel, and for every number of threads, sequences and tokens that are
// asked for; they are not those of attend(), whose sums have another order. Beside the inputs memory for a copy of keys
// and values is taken, each sequence padded to a multiple of 64 tokens. Throws std::invalid_argument where the cache is
// not empty or too small, or more tokens are asked for than there are.
void attend_prompt(const AttentionShape& shape, const PromptInputs& inputs, const RotaryPositions& positions,
                   const KeyValueCache& cache, uint16_t* out, ComputeThreads& threads, simd::PromptAttention kernel);

}  // namespace zipmoe
