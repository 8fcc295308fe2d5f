#include "compute/row_product.hpp"

#include <span>

namespace zipmoe {

RowProduct::RowProduct(const WeightMatrix& matrix, const TokenInputs& inputs, uint64_t row_begin, uint64_t row_end,
                       const simd::GemvKernels& kernels, ScratchPool& scratch)
    : matrix_(matrix), inputs_(inputs), row_begin_(row_begin), row_end_(row_end), kernels_(kernels) {
  if (kernels.unpacked == nullptr || inputs.tokens() < kernels.unpacked_tokens_min) return;
  unpacked_.emplace(scratch, matrix.unpacked_values(row_begin, row_end));
  matrix.unpack(row_begin, row_end, unpacked_->values(), kernels);
}

uint64_t RowProduct::multiply(TokenRange tokens, float* sums, uint64_t stride) const {
  if (!unpacked_) return matrix_.multiply(inputs_, tokens, row_begin_, row_end_, sums, stride, kernels_);
  // In the last turn the next task's weights are fetched.
  const bool last = tokens.end == inputs_.tokens();
  const auto upcoming = last ? matrix_.bytes_behind(row_begin_, row_end_) : std::span<const uint8_t>();
  return matrix_.multiply_unpacked(unpacked_->values(), inputs_, tokens, row_begin_, row_end_, sums, stride, upcoming,
                                   kernels_);
}

}  // namespace zipmoe
