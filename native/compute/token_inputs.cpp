#include "compute/token_inputs.hpp"

#include <cstring>
#include <stdexcept>
#include <string>

namespace zipmoe {

TokenInputs::TokenInputs(uint64_t tokens, uint64_t columns)
    : tokens_(tokens), columns_(columns), blocks_((columns + 63) / 64) {
  if (tokens == 0 || tokens > simd::kGemvTokensMax) {
    throw std::invalid_argument("the kernels compute 1 to " + std::to_string(simd::kGemvTokensMax) + " tokens, not " +
                                std::to_string(tokens));
  }
  storage_.resize(tokens * blocks_);
}

TokenInputs::TokenInputs(const uint16_t* x, uint64_t tokens, uint64_t columns, uint64_t stride)
    : TokenInputs(tokens, columns) {
  for (uint64_t token = 0; token < tokens; ++token) {
    std::memcpy(row(token), x + token * stride, columns * sizeof(uint16_t));
  }
}

uint16_t* TokenInputs::row(uint64_t token) { return storage_[token * blocks_].values; }

simd::GemvInputs TokenInputs::from(uint64_t column) const {
  return {storage_.data()->values + column, blocks_ * 64, tokens_};
}

}  // namespace zipmoe
