// Parts of a decoder layer that run as one call: their dense matrices, by record, and the vectors beside them.
#pragma once
#include <cstdint>
#include <span>
#include <vector>

#include "compute/activation.hpp"
#include "compute/attention.hpp"
#include "runtime/record_table.hpp"

namespace zipmoe {

// A dense matrix, cut into records of consecutive rows, with its bias.
struct DenseProjection {
  std::vector<RecordIndex> blocks;
  std::span<const uint16_t> bias;  // BF16 [rows], or empty
};

// Attention with projections of queries, keys, values and the output.
struct AttentionLayer {
  DenseProjection query;
  DenseProjection key;
  DenseProjection value;
  DenseProjection output;
  AttentionShape shape;
  RmsNorm query_norm;  // of each head; weight: none where there is no such norm
  RmsNorm key_norm;
};

// Queries, keys and values of new tokens: BF16 [sequences][tokens][heads * head_dimension], not yet normed or rotated;
// the queries are those of the last `query_tokens` of each sequence only.
struct ProjectedTokens {
  const uint16_t* queries = nullptr;
  const uint16_t* keys = nullptr;
  const uint16_t* values = nullptr;
  uint64_t sequences = 0;
  uint64_t tokens = 0;  // of each sequence
  uint64_t query_tokens = tokens;
};

// down(activation(gate x, up x)) with matrices of one record each.
struct DenseNetwork {
  DenseProjection gate;
  DenseProjection up;
  DenseProjection down;
  GatedActivation activation;
};

}  // namespace zipmoe
