// Computing on weights as they lie in memory: packed ones of a fused codec, decoded ones of the pool F.
#include <stdexcept>

#include "compute/packed_matrix.hpp"
#include "runtime/engine.hpp"
#include "runtime/stopwatch.hpp"

namespace zipmoe {
namespace {

void require_rows(const BFloat16Rows& x, uint64_t columns, std::span<uint16_t> out, uint64_t out_columns) {
  if (x.values.size() != x.rows * columns || x.rows == 0) throw std::invalid_argument("the input has another shape");
  if (out.size() != x.rows * out_columns) throw std::invalid_argument("the output has another shape");
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

void Engine::feed_forward(RecordIndex record, const ExpertNetwork& network, const BFloat16Rows& x,
                          std::span<uint16_t> out) {
  std::lock_guard lock(mutex_);
  require_open();
  const WeightMatrix first = weight_matrix(record, network.first);
  std::optional<Projection> up;
  if (network.up) up = Projection{.matrix = weight_matrix(record, *network.up)};
  const WeightMatrix down = weight_matrix(record, network.down);
  const uint64_t hidden = first.shape().columns;
  const uint64_t out_columns = down.shape().rows;
  require_rows(x, hidden, out, out_columns);
  const Stopwatch stopwatch(counters_.compute_seconds);
  const simd::GemvKernels& kernels = simd::gemv_kernels(options_.instruction_set);
  const ExpertFeedForward expert{
      .first = {.matrix = first},
      .up = up,
      .down = {.matrix = down},
      .x = x.values.data(),
      .x_stride = hidden,
      .tokens = x.rows,
      .output = {.bfloat16 = out.data(), .stride = out_columns},
  };
  compute_experts({&expert, 1}, network.activation, *compute_threads_, kernels);
}

}  // namespace zipmoe
