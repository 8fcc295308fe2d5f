// Attention of one new token of each sequence over its cached keys and values: norms of the heads, rotary positions,
// the cache's new entries, softmax(q K^T) V.
#pragma once
#include <cstdint>

#include "compute/compute_threads.hpp"
#include "compute/head_preparation.hpp"
#include "simd/attention_kernels.hpp"

namespace zipmoe {

struct AttentionShape {
  uint64_t query_heads = 0;  // a multiple of key_value_heads
  uint64_t key_value_heads = 0;
  uint64_t head_dimension = 0;  // multiple of simd::kAttentionLanes
  float scale = 0.0f;           // of the scores

  // Throws std::invalid_argument.
  void check() const;
};

// BF16 [rows][key_value_heads][capacity][head_dimension]; `length` positions are there, the new one is written behind.
struct KeyValueCache {
  uint16_t* keys = nullptr;
  uint16_t* values = nullptr;
  uint64_t length = 0;
  uint64_t capacity = 0;
};

struct AttentionInputs {
  uint64_t rows = 0;                  // sequences
  const uint16_t* queries = nullptr;  // BF16 [rows][query_heads * head_dimension]
  const uint16_t* keys = nullptr;     // BF16 [rows][key_value_heads * head_dimension]
  const uint16_t* values = nullptr;
  RmsNorm query_norm;  // of each head, before the rotation
  RmsNorm key_norm;
};

// out: BF16 [rows][query_heads * head_dimension]. The results are the same bits on every instruction set and for every
// number of threads and rows. Throws std::invalid_argument where the cache is full.
void attend(const AttentionShape& shape, const AttentionInputs& inputs, const RotaryPositions& positions,
            const KeyValueCache& cache, uint16_t* out, ComputeThreads& threads, const simd::AttentionKernels& kernels);

}  // namespace zipmoe
