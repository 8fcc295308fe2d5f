#include "compute/row_product.hpp"

#include <algorithm>

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
  const std::span<const uint8_t> upcoming = upcoming_after(tokens);
  return matrix_.multiply_unpacked(unpacked_->values(), inputs_, tokens, row_begin_, row_end_, sums, stride, upcoming,
                                   kernels_);
}

std::span<const uint8_t> RowProduct::upcoming_after(TokenRange tokens) const {
  if (tokens.end == inputs_.tokens()) return matrix_.packed_bytes_behind(row_begin_, row_end_);
  const uint64_t end = std::min(tokens.end + tokens.count(), inputs_.tokens());
  const simd::GemvInputs next = inputs_.from(0, tokens.end, end);
  return {reinterpret_cast<const uint8_t*>(next.x), next.tokens * next.stride * sizeof(uint16_t)};
}

}  // namespace zipmoe
