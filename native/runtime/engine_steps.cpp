// Whole parts of a decoder layer.
#include <algorithm>
#include <stdexcept>

#include "compute/joint_gemv.hpp"
#include "compute/prompt_attention.hpp"
#include "runtime/engine.hpp"
#include "runtime/stopwatch.hpp"

namespace zipmoe {
namespace {

// The last `count` rows of each sequence.
std::vector<uint16_t> last_rows(const BFloat16Rows& x, uint64_t sequences, uint64_t count) {
  const uint64_t sequence_values = x.values.size() / sequences;
  const uint64_t last_values = x.columns() * count;
  std::vector<uint16_t> result;
  result.reserve(sequences * last_values);
  for (uint64_t end = sequence_values; end <= x.values.size(); end += sequence_values) {
    const auto found = x.values.subspan(end - last_values, last_values);
    result.insert(result.end(), found.begin(), found.end());
  }
  return result;
}

}  // namespace

std::vector<Projection> Engine::projections(const DenseProjection& dense, uint64_t columns) const {
  std::vector<Projection> result;
  uint64_t rows = 0;
  for (const RecordIndex block : dense.blocks) {
    const WeightMatrix matrix = weight_matrix(block, 0);
    if (matrix.shape().columns != columns) throw std::invalid_argument("a matrix has another number of columns");
    result.push_back({.matrix = matrix, .bias = dense.bias.empty() ? nullptr : dense.bias.data() + rows});
    rows += matrix.shape().rows;
  }
  if (result.empty()) throw std::invalid_argument("a matrix has at least one block");
  if (!dense.bias.empty() && dense.bias.size() != rows) {
    throw std::invalid_argument("a bias has one value for every row");
  }
  return result;
}

void Engine::attention_step(const AttentionLayer& layer, const BFloat16Rows& x, uint64_t sequences,
                            uint64_t query_tokens, const RotaryPositions& positions, const KeyValueCache& cache,
                            std::span<uint16_t> out) {
  std::lock_guard lock(mutex_);
  require_open();
  const uint64_t hidden = x.columns();
  const AttentionShape& shape = layer.shape;
  shape.check();
  if (sequences == 0 || x.rows % sequences != 0)
    throw std::invalid_argument("sequences have the same number of tokens");
  if (query_tokens == 0 || query_tokens > x.rows / sequences) {
    throw std::invalid_argument("the output is of at least one token of each sequence, and of no more than there are");
  }
  const uint64_t out_rows = sequences * query_tokens;
  if (out.size() % out_rows != 0) throw std::invalid_argument("the output has another shape");
  const uint64_t query_columns = shape.query_heads * shape.head_dimension;
  const uint64_t key_columns = shape.key_value_heads * shape.head_dimension;
  const Stopwatch stopwatch(counters_.compute_seconds);
  const simd::GemvKernels& kernels = simd::gemv_kernels(options_.instruction_set);

  require_compute_threads();
  ScratchPool& memory = compute_threads_->scratch();
  ScratchPool::Lease queries(memory, out_rows * query_columns);
  ScratchPool::Lease keys(memory, x.rows * key_columns);
  ScratchPool::Lease values(memory, x.rows * key_columns);
  std::vector<DenseProduct> products = {{&layer.key, keys.values(), key_columns},
                                        {&layer.value, values.values(), key_columns}};
  const DenseProduct query{&layer.query, queries.values(), query_columns};
  if (out_rows == x.rows) {
    products.insert(products.begin(), query);
  } else {
    multiply_jointly({last_rows(x, sequences, query_tokens), out_rows}, hidden, {query}, kernels);
  }
  multiply_jointly(x, hidden, products, kernels);
  ScratchPool::Lease attended(memory, out_rows * query_columns);
  mix_values(layer, {queries.values(), keys.values(), values.values(), sequences, x.rows / sequences, query_tokens},
             positions, cache, attended.values());
  multiply_jointly({{attended.values(), out_rows * query_columns}, out_rows}, query_columns,
                   {{&layer.output, out.data(), out.size() / out_rows}}, kernels);
}

void Engine::mix_values(const AttentionLayer& layer, const ProjectedTokens& tokens, const RotaryPositions& positions,
                        const KeyValueCache& cache, uint16_t* out) {
  require_compute_threads();
  if (tokens.tokens == 1) {
    const AttentionInputs inputs{tokens.sequences, tokens.queries,   tokens.keys,
                                 tokens.values,    layer.query_norm, layer.key_norm};
    attend(layer.shape, inputs, positions, cache, out, *compute_threads_,
           simd::attention_kernels(options_.instruction_set));
  } else {
    const PromptInputs inputs{tokens.sequences, tokens.tokens,    tokens.queries, tokens.keys,
                              tokens.values,    layer.query_norm, layer.key_norm, tokens.query_tokens};
    attend_prompt(layer.shape, inputs, positions, cache, out, *compute_threads_,
                  simd::prompt_attention(options_.instruction_set));
  }
}

void Engine::multiply_jointly(const BFloat16Rows& x, uint64_t columns, const std::vector<DenseProduct>& products,
                              const simd::GemvKernels& kernels) {
  std::vector<std::vector<Projection>> matrices;
  for (const DenseProduct& product : products) {
    matrices.push_back(projections(*product.matrix, columns));
    uint64_t rows = 0;
    for (const Projection& block : matrices.back()) rows += block.matrix.shape().rows;
    if (rows != product.columns) throw std::invalid_argument("a matrix has another number of rows");
  }
  require_compute_threads();
  const TokenInputs inputs({x.values.data(), columns}, x.rows, columns, *compute_threads_);
  std::vector<JointProduct> joint;
  for (size_t i = 0; i < products.size(); ++i) {
    uint16_t* to = products[i].out;
    for (const Projection& block : matrices[i]) {
      joint.push_back({block, {.bfloat16 = to, .stride = products[i].columns}});
      to += block.matrix.shape().rows;
    }
  }
  joint_gemv(joint, inputs, *compute_threads_, kernels);
}

void Engine::require_compute_threads() const {
  if (!compute_threads_) throw std::invalid_argument("nothing is computed with a codec that has no fused kernels");
}

void Engine::normalise(const RmsNorm& norm, const BFloat16Rows& x, uint16_t* out) {
  std::lock_guard lock(mutex_);
  require_open();
  require_compute_threads();
  const Stopwatch stopwatch(counters_.compute_seconds);
  rms_norm(norm, x.values.data(), x.rows, x.columns(), out, simd::norm_kernels(options_.instruction_set),
           *compute_threads_);
}

ExpertFeedForward Engine::dense_feed_forward(const DenseNetwork& network, const BFloat16Rows& x,
                                             std::span<uint16_t> out) const {
  const uint64_t hidden = x.columns();
  const std::vector<Projection> gate = projections(network.gate, hidden);
  const std::vector<Projection> up = projections(network.up, hidden);
  const std::vector<Projection> down = projections(network.down, gate.front().matrix.shape().rows);
  if (gate.size() != 1 || up.size() != 1 || down.size() != 1) {
    throw std::invalid_argument("the matrices of a feed-forward network are one record each");
  }
  const uint64_t out_columns = down.front().matrix.shape().rows;
  if (out.size() != x.rows * out_columns) throw std::invalid_argument("the output has another shape");
  return {
      .first = gate.front(),
      .up = up.front(),
      .down = down.front(),
      .x = {x.values.data(), hidden},
      .tokens = x.rows,
      .output = {.bfloat16 = out.data(), .stride = out_columns},
  };
}

void Engine::feed_forward_step(const DenseNetwork& network, const BFloat16Rows& x, std::span<uint16_t> out) {
  std::lock_guard lock(mutex_);
  require_open();
  const ExpertFeedForward feed_forward = dense_feed_forward(network, x, out);
  const Stopwatch stopwatch(counters_.compute_seconds);
  compute_experts({&feed_forward, 1}, network.activation, *compute_threads_,
                  simd::gemv_kernels(options_.instruction_set));
}

}  // namespace zipmoe
