// Products of some rows of a matrix with turn after turn of tokens.
#pragma once
#include <cstdint>
#include <optional>

#include "compute/row_tasks.hpp"
#include "compute/scratch_pool.hpp"
#include "compute/token_inputs.hpp"
#include "compute/weight_matrix.hpp"
#include "simd/gemv_kernels.hpp"

namespace zipmoe {

// Where there are many tokens and the kernels are for it, the rows are unpacked once, at construction.
class RowProduct {
 public:
  // Rows [row_begin, row_end). Everything must stay as long as this does.
  RowProduct(const WeightMatrix& matrix, const TokenInputs& inputs, uint64_t row_begin, uint64_t row_end,
             const simd::GemvKernels& kernels, ScratchPool& scratch);

  // Sums of one turn; returns the offset of row_begin in them (WeightMatrix::multiply).
  uint64_t multiply(TokenRange tokens, float* sums, uint64_t stride) const;

 private:
  const WeightMatrix& matrix_;
  const TokenInputs& inputs_;
  uint64_t row_begin_;
  uint64_t row_end_;
  const simd::GemvKernels& kernels_;
  std::optional<ScratchPool::Lease> unpacked_;
};

}  // namespace zipmoe
