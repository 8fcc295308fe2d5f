// Inputs of tokens as the kernels want them: aligned, and padded with zeros to whole blocks of columns.
#pragma once
#include <cstdint>
#include <vector>

#include "simd/gemv_kernels.hpp"

namespace zipmoe {

class TokenInputs {
 public:
  // All zeros. Throws std::invalid_argument for no tokens.
  TokenInputs(uint64_t tokens, uint64_t columns);
  // Copies x: BF16 patterns [tokens][columns], `stride` values from one token to the next.
  TokenInputs(const uint16_t* x, uint64_t tokens, uint64_t columns, uint64_t stride);

  uint64_t tokens() const { return tokens_; }
  uint64_t columns() const { return columns_; }
  uint16_t* row(uint64_t token);  // `columns` values; what is behind them stays zero

  // Of the tokens [begin, end) from a column on, which is a multiple of 64.
  simd::GemvInputs from(uint64_t column, uint64_t begin, uint64_t end) const;

 private:
  struct alignas(64) Block {
    uint16_t values[64] = {};
  };

  uint64_t tokens_;
  uint64_t columns_;
  uint64_t blocks_;  // from one token to the next
  std::vector<Block> storage_;
};

}  // namespace zipmoe
