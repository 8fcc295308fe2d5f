#include "compute/joint_gemv.hpp"

#include <algorithm>
#include <stdexcept>
#include <vector>

#include "compute/row_tasks.hpp"

namespace zipmoe {

void joint_gemv(std::span<const JointProduct> products, const TokenInputs& inputs, ComputeThreads& threads,
                const simd::GemvKernels& kernels) {
  struct Task {
    const JointProduct* product;
    uint64_t row_begin;
    uint64_t row_end;
  };
  std::vector<Task> tasks;
  for (const JointProduct& product : products) {
    const MatrixShape shape = product.projection.matrix.shape();
    if (inputs.columns() != shape.columns) throw std::invalid_argument("the inputs do not have the matrix's columns");
    const uint64_t rows =
        rows_per_task(product.projection.matrix.group_bytes(), inputs.tokens(), shape.rows, threads.threads());
    for (uint64_t begin = 0; begin < shape.rows; begin += rows) {
      tasks.push_back({&product, begin, std::min(begin + rows, shape.rows)});
    }
  }
  threads.run(static_cast<uint32_t>(tasks.size()), [&](uint32_t index) {
    const Task& task = tasks[index];
    gemv_rows(task.product->projection, inputs, task.product->output, task.row_begin, task.row_end, kernels,
              threads.scratch());
  });
}

}  // namespace zipmoe
