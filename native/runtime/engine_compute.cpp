// Computing on weights as they lie in memory: packed ones of a fused codec, decoded ones of the pool F.
#include <stdexcept>

#include "compute/packed_matrix.hpp"
#include "runtime/engine.hpp"
#include "runtime/stopwatch.hpp"

namespace zipmoe {
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

void Engine::feed_rows_forward(RecordIndex record, const ExpertNetwork& network, const NetworkInputs& x,
                               std::span<uint16_t> out) {
  std::lock_guard lock(mutex_);
  require_open();
  const WeightMatrix first = weight_matrix(record, network.first);
  std::optional<Projection> up;
  if (network.up) up = Projection{.matrix = weight_matrix(record, *network.up)};
  const WeightMatrix down = weight_matrix(record, network.down);
  const uint64_t out_columns = down.shape().rows;
  if (x.columns != first.shape().columns) throw std::invalid_argument("the input has another shape");
  if (out.size() != x.count * out_columns) throw std::invalid_argument("the output has another shape");
  const Stopwatch stopwatch(counters_.compute_seconds);
  const ExpertFeedForward expert{
      .first = {.matrix = first},
      .up = up,
      .down = {.matrix = down},
      .x = x.rows,
      .tokens = x.count,
      .output = {.bfloat16 = out.data(), .stride = out_columns},
  };
  compute_experts({&expert, 1}, network.activation, *compute_threads_, simd::gemv_kernels(options_.instruction_set));
}

void Engine::feed_forward(RecordIndex record, const ExpertNetwork& network, const BFloat16Rows& x,
                          std::span<uint16_t> out) {
  const uint64_t columns = x.columns();
  feed_rows_forward(record, network, {{x.values.data(), columns}, x.rows, columns}, out);
}

void Engine::feed_forward(RecordIndex record, const ExpertNetwork& network, const SelectedRows& x,
                          std::span<uint16_t> out) {
  const uint64_t columns = x.from.columns();
  for (const uint64_t number : x.numbers) {
    if (number >= x.from.rows) throw std::invalid_argument("the input does not have so many rows");
  }
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
