#include "compute/token_inputs.hpp"

#include <cstring>
#include <stdexcept>

namespace zipmoe {

TokenInputs::TokenInputs(uint64_t tokens, uint64_t columns)
    // An odd number of blocks: tokens a multiple of 4 KiB apart would share the same few lines of the cache.
    : tokens_(tokens), columns_(columns), blocks_(((columns + 63) / 64) | 1) {
  if (tokens == 0) throw std::invalid_argument("products need at least one token");
  storage_.resize(tokens * blocks_);
}

TokenInputs::TokenInputs(const uint16_t* x, uint64_t tokens, uint64_t columns, uint64_t stride)
    : TokenInputs(tokens, columns) {
  for (uint64_t token = 0; token < tokens; ++token) {
    std::memcpy(row(token), x + token * stride, columns * sizeof(uint16_t));
  }
}

uint16_t* TokenInputs::row(uint64_t token) { return storage_[token * blocks_].values; }

simd::GemvInputs TokenInputs::from(uint64_t column, uint64_t begin, uint64_t end) const {
  return {storage_[begin * blocks_].values + column, blocks_ * 64, end - begin};
}

}  // namespace zipmoe
