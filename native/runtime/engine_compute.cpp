// Computing on weights as they lie in memory: packed ones of a fused codec, decoded ones of the pool F.
#include <stdexcept>

#include "compute/packed_matrix.hpp"
#include "runtime/engine.hpp"
#include "runtime/stopwatch.hpp"

namespace zipmoe {
namespace {

void check_numbers(std::span<const uint64_t> numbers, uint64_t rows) {
  for (const uint64_t number : numbers) {
    if (number >= rows) throw std::invalid_argument("the input does not have so many rows");
  }
}

// Whether two networks with gates do the same between their matrices, wherever gate and up lie.
bool same_but_for_layout(const GatedActivation& a, GatedActivation b) {
  if (a.layout == GateLayout::none || b.layout == GateLayout::none) return false;
  b.layout = a.layout;
  return a == b;
}

}  // namespace

uint64_t BFloat16Rows::columns() const {
  if (rows == 0 || values.size() % rows != 0) throw std::invalid_argument("the input has another shape");
  return values.size() / rows;
}

WeightMatrix Engine::weight_matrix(RecordIndex record, uint32_t matrix) const {
  const MatrixView view = readable_view(record, matrix);
  if (in_full_pool(record)) {
    const uint8_t* decoded = pool_memory_->full(record) + table_.decoded_offset(record, matrix);
    return WeightMatrix::bfloat16({reinterpret_cast<const uint16_t*>(decoded), view.shape.rows * view.shape.columns},
                                  view.shape);
  }
  try {
    return packed_matrix(table_.codec(), view);
  } catch (const FormatError& error) {
    throw RecordError(RecordFault::invalid_encoding, record, error.what());
  }
}

void Engine::multiply(std::span<const RecordIndex> blocks, const BFloat16Rows& x, std::span<const uint16_t> bias,
                      std::span<uint16_t> out) {
  std::lock_guard lock(mutex_);
  require_open();
  const uint64_t columns = x.columns();
  if (out.size() % x.rows != 0) throw std::invalid_argument("the output has another shape");
  const DenseProjection dense{.blocks = {blocks.begin(), blocks.end()}, .bias = bias};
  const Stopwatch stopwatch(counters_.compute_seconds);
  multiply_jointly(x, columns, {{&dense, out.data(), out.size() / x.rows}},
                   simd::gemv_kernels(options_.instruction_set));
}

ExpertFeedForward Engine::expert_feed_forward(RecordIndex record, const ExpertNetwork& network, const TokenRows& x,
                                              uint64_t rows, std::span<uint16_t> out) const {
  const WeightMatrix first = weight_matrix(record, network.first);
  std::optional<Projection> up;
  if (network.up) up = Projection{.matrix = weight_matrix(record, *network.up)};
  const WeightMatrix down = weight_matrix(record, network.down);
  const uint64_t out_columns = down.shape().rows;
  if (x.stride != first.shape().columns) throw std::invalid_argument("the input has another shape");
  if (out.size() != rows * out_columns) throw std::invalid_argument("the output has another shape");
  return {
      .first = {.matrix = first},
      .up = up,
      .down = {.matrix = down},
      .x = x,
      .tokens = rows,
      .output = {.bfloat16 = out.data(), .stride = out_columns},
  };
}

void Engine::feed_rows_forward(RecordIndex record, const ExpertNetwork& network, const NetworkInputs& x,
                               std::span<uint16_t> out) {
  std::lock_guard lock(mutex_);
  require_open();
  require_compute_threads();  // experts of F are decoded, whatever the codec is
  const ExpertFeedForward expert = expert_feed_forward(record, network, x.rows, x.count, out);
  const Stopwatch stopwatch(counters_.compute_seconds);
  compute_experts({&expert, 1}, network.activation, *compute_threads_, simd::gemv_kernels(options_.instruction_set));
}

void Engine::feed_forward_jointly(std::span<const ExpertRows> experts, const ExpertNetwork& network,
                                  const BFloat16Rows& x, std::span<uint16_t> out, const DenseNetwork* dense,
                                  std::span<uint16_t> dense_out) {
  std::lock_guard lock(mutex_);
  require_open();
  require_compute_threads();
  const uint64_t columns = x.columns();
  uint64_t rows = 0;
  for (const ExpertRows& expert : experts) rows += expert.numbers.size();
  if (rows == 0 || out.size() % rows != 0) throw std::invalid_argument("the output has another shape");
  const uint64_t out_columns = out.size() / rows;
  std::vector<ExpertFeedForward> networks;
  // The dense one first: it is the largest, and what is left over at the end should be small.
  if (dense != nullptr) networks.push_back(dense_feed_forward(*dense, x, dense_out));
  uint64_t first = 0;
  for (const ExpertRows& expert : experts) {
    check_numbers(expert.numbers, x.rows);
    const uint64_t count = expert.numbers.size();
    networks.push_back(expert_feed_forward(expert.record, network, {x.values.data(), columns, expert.numbers}, count,
                                           out.subspan(first * out_columns, count * out_columns)));
    first += count;
  }
  const Stopwatch stopwatch(counters_.compute_seconds);
  const simd::GemvKernels& kernels = simd::gemv_kernels(options_.instruction_set);
  std::span<const ExpertFeedForward> together = networks;
  if (dense != nullptr && !same_but_for_layout(dense->activation, network.activation)) {
    compute_experts(together.first(1), dense->activation, *compute_threads_, kernels);
    together = together.subspan(1);
  }
  compute_experts(together, network.activation, *compute_threads_, kernels);
}

void Engine::feed_forward(RecordIndex record, const ExpertNetwork& network, const BFloat16Rows& x,
                          std::span<uint16_t> out) {
  const uint64_t columns = x.columns();
  feed_rows_forward(record, network, {{x.values.data(), columns}, x.rows, columns}, out);
}

void Engine::feed_forward(RecordIndex record, const ExpertNetwork& network, const SelectedRows& x,
                          std::span<uint16_t> out) {
  const uint64_t columns = x.from.columns();
  check_numbers(x.numbers, x.from.rows);
  feed_rows_forward(record, network, {{x.from.values.data(), columns, x.numbers}, x.numbers.size(), columns}, out);
}

void Engine::combine(const ExpertTerms& terms, const uint16_t* outputs, uint64_t columns, uint16_t* out) {
  std::lock_guard lock(mutex_);
  require_open();
  require_compute_threads();
  const Stopwatch stopwatch(counters_.compute_seconds);
  terms.combine(outputs, columns, out, simd::weighted_sum(options_.instruction_set), *compute_threads_);
}

}  // namespace zipmoe
