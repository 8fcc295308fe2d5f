// y = W x (+ bias) for any number of tokens on several threads.
#pragma once
#include <cstdint>

#include "compute/compute_threads.hpp"
#include "compute/token_inputs.hpp"
#include "compute/weight_matrix.hpp"

namespace zipmoe {

// Where results go: [tokens][stride], either fp32 sums or BF16 rounded to nearest even; exactly one of the two is
// given.
struct GemvOutput {
  float* float32 = nullptr;
  uint16_t* bfloat16 = nullptr;
  uint64_t stride = 0;

  // Writes the results of the rows [row_begin, row_end) for one token, one NaN standing for all.
  void write(uint64_t token, uint64_t row_begin, uint64_t row_end, const float* values) const;
};

// A matrix with the bias that is added to its fp32 sums before they are rounded.
struct Projection {
  WeightMatrix matrix;
  const uint16_t* bias = nullptr;  // BF16 [rows], or none

  // To the sums of the rows [row_begin, row_end).
  void add_bias(uint64_t row_begin, uint64_t row_end, float* sums) const;
};

// The results are the same bits on every instruction set and for every number of threads. Throws std::invalid_argument
// unless the inputs have as many columns as the matrix.
void gemv(const Projection& projection, const TokenInputs& inputs, const GemvOutput& output, ComputeThreads& threads,
          const simd::GemvKernels& kernels);

// One task of it: rows [row_begin, row_end), at most kTaskRowsMax of them (row_tasks.hpp).
void gemv_rows(const Projection& projection, const TokenInputs& inputs, const GemvOutput& output, uint64_t row_begin,
               uint64_t row_end, const simd::GemvKernels& kernels, ScratchPool& scratch);

}  // namespace zipmoe
