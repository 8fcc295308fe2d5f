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
  std::vector<WeightMatrix> matrices;
  uint64_t rows = 0;
  for (const RecordIndex block : blocks) {
    matrices.push_back(weight_matrix(block, 0));
    rows += matrices.back().shape().rows;
  }
  if (matrices.empty()) throw std::invalid_argument("a matrix has at least one block");
  const uint64_t columns = matrices.front().shape().columns;
  require_rows(x, columns, out, rows);
  if (!bias.empty() && bias.size() != rows) throw std::invalid_argument("a bias has one value for every row");
  const Stopwatch stopwatch(counters_.compute_seconds);
  const simd::GemvKernels& kernels = simd::gemv_kernels(options_.instruction_set);
  const TokenInputs inputs(x.values.data(), x.rows, columns, columns);
  uint64_t row = 0;
  for (const WeightMatrix& matrix : matrices) {
    gemv({.matrix = matrix, .bias = bias.empty() ? nullptr : bias.data() + row}, inputs,
         {.bfloat16 = out.data() + row, .stride = rows}, *compute_threads_, kernels);
    row += matrix.shape().rows;
  }
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
