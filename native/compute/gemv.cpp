#include "compute/gemv.hpp"

#include "compute/bfloat16.hpp"
#include "compute/joint_gemv.hpp"
#include "compute/row_product.hpp"
#include "compute/row_tasks.hpp"

namespace zipmoe {

void GemvOutput::write(uint64_t token, uint64_t row_begin, uint64_t row_end, const float* values) const {
  const uint64_t at = token * stride + row_begin;
  if (float32 != nullptr) {
    for (uint64_t i = 0; i < row_end - row_begin; ++i) float32[at + i] = with_one_nan(values[i]);
  } else {
    for (uint64_t i = 0; i < row_end - row_begin; ++i) bfloat16[at + i] = float_to_bfloat16(values[i]);
  }
}

void Projection::add_bias(uint64_t row_begin, uint64_t row_end, float* sums) const {
  if (bias == nullptr) return;
  for (uint64_t row = row_begin; row < row_end; ++row) sums[row - row_begin] += bfloat16_to_float(bias[row]);
}

void gemv_rows(const Projection& projection, const TokenInputs& inputs, const GemvOutput& output, uint64_t row_begin,
               uint64_t row_end, const simd::GemvKernels& kernels, ScratchPool& scratch) {
  TaskSums sums;
  const RowProduct product(projection.matrix, inputs, row_begin, row_end, kernels, scratch);
  for_each_turn(inputs.tokens(), [&](TokenRange tokens) {
    const uint64_t offset = product.multiply(tokens, sums[0], kTaskSumRows);
    for (uint64_t token = 0; token < tokens.count(); ++token) {
      float* values = sums[token] + offset;
      projection.add_bias(row_begin, row_end, values);
      output.write(tokens.begin + token, row_begin, row_end, values);
    }
  });
}

void gemv(const Projection& projection, const TokenInputs& inputs, const GemvOutput& output, ComputeThreads& threads,
          const simd::GemvKernels& kernels) {
  const JointProduct product{projection, output};
  joint_gemv({&product, 1}, inputs, threads, kernels);
}

}  // namespace zipmoe
