#include "compute/attention.hpp"

#include <algorithm>
#include <stdexcept>
#include <vector>

#include "compute/activation.hpp"
#include "compute/bfloat16.hpp"
#include "compute/lane_sums.hpp"

namespace zipmoe {
namespace {

// The heads of one row that share keys and values.
class HeadGroup {
 public:
  HeadGroup(const AttentionShape& shape, const AttentionInputs& inputs, const RotaryPositions& positions,
            const KeyValueCache& cache, uint64_t row, uint64_t key_value_head)
      : shape_(shape), inputs_(inputs), positions_(positions), cache_(cache), row_(row), head_(key_value_head) {}

  // Writes the new entries of the cache.
  void append() {
    const uint64_t size = shape_.head_dimension;
    const uint64_t from = (row_ * shape_.key_value_heads + head_) * size;
    const uint64_t to = cache_offset() + cache_.length * size;
    std::vector<float> key(size);
    prepare_head(inputs_.keys + from, inputs_.key_norm, positions_, row_, 0, key);
    for (uint64_t i = 0; i < size; ++i) cache_.keys[to + i] = float_to_bfloat16(key[i]);
    std::copy_n(inputs_.values + from, size, cache_.values + to);
  }

  void attend(uint16_t* out, const simd::AttentionKernels& kernels) {
    const uint64_t size = shape_.head_dimension;
    const uint64_t positions = cache_.length + 1;
    const uint64_t shared_by = shape_.query_heads / shape_.key_value_heads;
    std::vector<float> query(size);
    std::vector<float> mixed(size);
    std::vector<float> weights(positions);
    for (uint64_t i = 0; i < shared_by; ++i) {
      const uint64_t offset = (row_ * shape_.query_heads + head_ * shared_by + i) * size;
      prepare_head(inputs_.queries + offset, inputs_.query_norm, positions_, row_, 0, query);
      for (float& value : query) value = round_to_bfloat16(value);
      kernels.scores({.keys = cache_.keys + cache_offset(),
                      .positions = positions,
                      .head_dimension = size,
                      .query = query.data(),
                      .scale = shape_.scale,
                      .scores = weights.data()});
      exponentials_of_scores(weights.data(), weights.size());
      const float sum = sum_in_lanes(weights.size(), [&](uint64_t position) { return weights[position]; });
      kernels.mix({.values = cache_.values + cache_offset(),
                   .positions = positions,
                   .head_dimension = size,
                   .weights = weights.data(),
                   .out = mixed.data()});
      for (uint64_t d = 0; d < size; ++d) out[offset + d] = float_to_bfloat16(mixed[d] / sum);
    }
  }

 private:
  uint64_t cache_offset() const {
    return (row_ * shape_.key_value_heads + head_) * cache_.capacity * shape_.head_dimension;
  }

  const AttentionShape& shape_;
  const AttentionInputs& inputs_;
  const RotaryPositions& positions_;
  const KeyValueCache& cache_;
  uint64_t row_;
  uint64_t head_;
};

}  // namespace

void AttentionShape::check() const {
  if (key_value_heads == 0 || query_heads == 0 || query_heads % key_value_heads != 0) {
    throw std::invalid_argument("the query heads must be a multiple of the heads of keys and values");
  }
  if (head_dimension == 0 || head_dimension % simd::kAttentionLanes != 0) {
    throw std::invalid_argument("a head must have a multiple of 16 dimensions");
  }
}

void attend(const AttentionShape& shape, const AttentionInputs& inputs, const RotaryPositions& positions,
            const KeyValueCache& cache, uint16_t* out, ComputeThreads& threads, const simd::AttentionKernels& kernels) {
  shape.check();
  if (cache.length >= cache.capacity) throw std::invalid_argument("the key-value cache has no room for another token");
  positions.check(shape.head_dimension);
  threads.run(static_cast<uint32_t>(inputs.rows * shape.key_value_heads), [&](uint32_t task) {
    HeadGroup group(shape, inputs, positions, cache, task / shape.key_value_heads, task % shape.key_value_heads);
    group.append();
    group.attend(out, kernels);
  });
}

}  // namespace zipmoe
