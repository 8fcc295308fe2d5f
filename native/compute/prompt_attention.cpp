#include "compute/prompt_attention.hpp"

#include <algorithm>
#include <memory>
#include <stdexcept>
#include <vector>

#include "compute/bfloat16.hpp"

namespace zipmoe {
namespace {

using simd::kPromptKeys;
using simd::kPromptKeyVector;
using simd::kPromptQueries;

// Keys and values of all heads in the layout of the kernel.
class PackedKeysAndValues {
 public:
  PackedKeysAndValues(const AttentionShape& shape, const PromptInputs& inputs)
      : dimensions_(shape.head_dimension),
        blocks_((inputs.tokens + kPromptKeys - 1) / kPromptKeys),
        head_values_(blocks_ * kPromptKeys * dimensions_),
        keys_(std::make_unique_for_overwrite<uint16_t[]>(inputs.sequences * shape.key_value_heads * head_values_)),
        values_(std::make_unique_for_overwrite<uint16_t[]>(inputs.sequences * shape.key_value_heads * head_values_)) {}

  uint64_t blocks() const { return blocks_; }
  const uint16_t* keys(uint64_t head) const { return keys_.get() + head * head_values_; }
  const uint16_t* values(uint64_t head) const { return values_.get() + head * head_values_; }

  // A block of one head, from `count` rows [count][head_dimension]; zeros behind them.
  void pack(uint64_t head, uint64_t block, uint64_t count, const uint16_t* keys, const uint16_t* values) {
    const uint64_t begin = head * head_values_ + block * kPromptKeys * dimensions_;
    uint16_t* packed_keys = keys_.get() + begin;
    uint16_t* packed_values = values_.get() + begin;
    if (count < kPromptKeys) {
      std::fill_n(packed_keys, kPromptKeys * dimensions_, uint16_t{0});
      std::fill_n(packed_values, kPromptKeys * dimensions_, uint16_t{0});
    }
    for (uint64_t row = 0; row < count; ++row) {
      const uint16_t* key = keys + row * dimensions_;
      uint16_t* key_to =
          packed_keys + row / kPromptKeyVector * kPromptKeyVector * dimensions_ + row % kPromptKeyVector * 2;
      for (uint64_t i = 0; i < dimensions_; i += 2) {
        key_to[i * kPromptKeyVector] = key[i];
        key_to[i * kPromptKeyVector + 1] = key[i + 1];
      }
      const uint16_t* value = values + row * dimensions_;
      uint16_t* value_to = packed_values + row / 2 * 2 * dimensions_ + row % 2;
      for (uint64_t i = 0; i < dimensions_; ++i) value_to[2 * i] = value[i];
    }
  }

 private:
  uint64_t dimensions_;
  uint64_t blocks_;
  uint64_t head_values_;
  std::unique_ptr<uint16_t[]> keys_;
  std::unique_ptr<uint16_t[]> values_;
};

class Prompt {
 public:
  Prompt(const AttentionShape& shape, const PromptInputs& inputs, const RotaryPositions& positions,
         const KeyValueCache& cache)
      : shape_(shape), inputs_(inputs), positions_(positions), cache_(cache), packed_(shape, inputs) {}

  uint64_t key_tasks() const { return inputs_.sequences * shape_.key_value_heads * packed_.blocks(); }
  uint64_t query_tasks() const { return inputs_.sequences * shape_.query_heads * query_blocks(); }

  // The cache's entries of a block of positions of one head.
  void write_keys_and_values(uint64_t task) {
    const uint64_t head = task / packed_.blocks();
    const uint64_t block = task % packed_.blocks();
    const uint64_t begin = block * kPromptKeys;
    const uint64_t count = std::min(kPromptKeys, inputs_.tokens - begin);
    const uint64_t sequence = head / shape_.key_value_heads;
    const uint64_t size = shape_.head_dimension;
    const uint64_t to = (head * cache_.capacity + begin) * size;
    std::vector<float> key(size);
    for (uint64_t i = 0; i < count; ++i) {
      const uint64_t row = sequence * inputs_.tokens + begin + i;
      const uint64_t from = (row * shape_.key_value_heads + head % shape_.key_value_heads) * size;
      prepare_head(inputs_.keys + from, inputs_.key_norm, positions_, sequence, begin + i, key);
      std::transform(key.begin(), key.end(), cache_.keys + to + i * size, float_to_bfloat16);
      std::copy_n(inputs_.values + from, size, cache_.values + to + i * size);
    }
    packed_.pack(head, block, count, cache_.keys + to, cache_.values + to);
  }

  // A block of queries of one head.
  void attend(uint64_t task, uint16_t* out, simd::PromptAttention kernel) const {
    const uint64_t head = task / query_blocks();  // of all sequences
    // Long blocks first, so that the last tasks are short ones.
    const uint64_t block = query_blocks() - 1 - task % query_blocks();
    const uint64_t begin = block * kPromptQueries;
    const uint64_t count = std::min(kPromptQueries, inputs_.query_tokens - begin);
    const uint64_t first_position = inputs_.tokens - inputs_.query_tokens + begin;
    const uint64_t sequence = head / shape_.query_heads;
    const uint64_t shared_by = shape_.query_heads / shape_.key_value_heads;
    const uint64_t key_head = sequence * shape_.key_value_heads + head % shape_.query_heads / shared_by;
    const uint64_t size = shape_.head_dimension;
    const uint64_t stride = shape_.query_heads * size;
    const uint64_t offset = (sequence * inputs_.query_tokens + begin) * stride + head % shape_.query_heads * size;
    std::vector<float> query(size);
    std::vector<uint16_t> queries(kPromptQueries * size);
    std::vector<float> sums(kPromptQueries * size);
    for (uint64_t i = 0; i < count; ++i) {
      prepare_head(inputs_.queries + offset + i * stride, inputs_.query_norm, positions_, sequence, first_position + i,
                   query);
      std::transform(query.begin(), query.end(), queries.begin() + i * size, float_to_bfloat16);
    }
    kernel({.queries = queries.data(),
            .first_position = first_position,
            .query_count = count,
            .keys = packed_.keys(key_head),
            .values = packed_.values(key_head),
            .head_dimension = size,
            .scale = shape_.scale,
            .sums = sums.data(),
            .out = out + offset,
            .out_stride = stride});
  }

 private:
  uint64_t query_blocks() const { return (inputs_.query_tokens + kPromptQueries - 1) / kPromptQueries; }

  const AttentionShape& shape_;
  const PromptInputs& inputs_;
  const RotaryPositions& positions_;
  const KeyValueCache& cache_;
  PackedKeysAndValues packed_;
};

}  // namespace

void attend_prompt(const AttentionShape& shape, const PromptInputs& inputs, const RotaryPositions& positions,
                   const KeyValueCache& cache, uint16_t* out, ComputeThreads& threads, simd::PromptAttention kernel) {
  shape.check();
  positions.check(shape.head_dimension);
  if (kernel == nullptr) throw std::invalid_argument("this instruction set has no kernel for the attention of prompts");
  if (cache.length != 0 || cache.capacity < inputs.tokens) {
    throw std::invalid_argument("the key-value cache must be empty and have room for the prompt");
  }
  if (inputs.query_tokens > inputs.tokens) throw std::invalid_argument("more tokens are asked for than there are");
  Prompt prompt(shape, inputs, positions, cache);
  threads.run(static_cast<uint32_t>(prompt.key_tasks()), [&](uint32_t task) { prompt.write_keys_and_values(task); });
  threads.run(static_cast<uint32_t>(prompt.query_tasks()), [&](uint32_t task) { prompt.attend(task, out, kernel); });
}

}  // namespace zipmoe
