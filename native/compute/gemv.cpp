#include "compute/gemv.hpp"

#include <algorithm>
#include <stdexcept>

#include "compute/bfloat16.hpp"
#include "compute/row_tasks.hpp"

namespace zipmoe {

void GemvOutput::write(uint64_t token, uint64_t row, float value) const {
  const uint64_t at = token * stride + row;
  if (float32 != nullptr) {
    float32[at] = with_one_nan(value);
  } else {
    bfloat16[at] = float_to_bfloat16(value);
  }
}

float Projection::biased(uint64_t row, float sum) const {
  return bias == nullptr ? sum : sum + bfloat16_to_float(bias[row]);
}

void gemv_rows(const Projection& projection, const TokenInputs& inputs, const GemvOutput& output, uint64_t row_begin,
               uint64_t row_end, const simd::GemvKernels& kernels) {
  float sums[simd::kGemvTokensMax][kTaskSumRows];
  const uint64_t offset = projection.matrix.multiply(inputs, row_begin, row_end, sums[0], kTaskSumRows, kernels);
  for (uint64_t token = 0; token < inputs.tokens(); ++token) {
    for (uint64_t row = row_begin; row < row_end; ++row) {
      output.write(token, row, projection.biased(row, sums[token][offset + row - row_begin]));
    }
  }
}

void gemv(const Projection& projection, const TokenInputs& inputs, const GemvOutput& output, ComputeThreads& threads,
          const simd::GemvKernels& kernels) {
  const MatrixShape shape = projection.matrix.shape();
  if (inputs.columns() != shape.columns) throw std::invalid_argument("the inputs do not have the matrix's columns");
  const uint64_t rows = rows_per_task(projection.matrix.group_bytes());
  const uint64_t tasks = (shape.rows + rows - 1) / rows;
  threads.run(static_cast<uint32_t>(tasks), [&](uint32_t task) {
    const uint64_t begin = task * rows;
    gemv_rows(projection, inputs, output, begin, std::min(begin + rows, shape.rows), kernels);
  });
}

}  // namespace zipmoe
