// Inputs of tokens as the kernels want them: aligned, panel by panel (Fx3Layout), padded with zeros to whole blocks of
// columns.
#pragma once
#include <algorithm>
#include <cstdint>
#include <span>

#include "compute/compute_threads.hpp"
#include "compute/scratch_pool.hpp"
#include "simd/gemv_kernels.hpp"

namespace zipmoe {

// Rows of BF16 patterns, `stride` values from one to the next: all of them in order, or, if there are any, those with
// these numbers.
struct TokenRows {
  const uint16_t* x = nullptr;
  uint64_t stride = 0;
  std::span<const uint64_t> numbers = {};

  const uint16_t* row(uint64_t token) const { return x + (numbers.empty() ? token : numbers[token]) * stride; }
};

class TokenInputs {
 public:
  // Whose values are still to be written. Throws std::invalid_argument for no tokens. The memory is the pool's.
  TokenInputs(uint64_t tokens, uint64_t columns, ScratchPool& memory);
  // Copies `columns` values of each row, on the threads and into their scratch memory.
  TokenInputs(const TokenRows& rows, uint64_t tokens, uint64_t columns, ComputeThreads& threads);

  uint64_t tokens() const { return tokens_; }
  uint64_t columns() const { return columns_; }
  // Of a token, from a column on and as far as its panel goes.
  std::span<uint16_t> piece(uint64_t token, uint64_t column) {
    const uint64_t panel = column / panel_columns_;
    const uint64_t end = std::min(columns_, (panel + 1) * panel_columns_);
    uint16_t* values = memory_.values() + panel * panel_step_ + token * stride_;
    return {values + (column - panel * panel_columns_), end - column};
  }

  // Of the tokens [begin, end), from a panel on.
  simd::GemvInputs from(uint64_t panel, uint64_t begin, uint64_t end) const {
    return {memory_.values() + panel * panel_step_ + begin * stride_, stride_, end - begin, panel_step_};
  }

 private:
  void write(uint64_t token, const uint16_t* values);

  uint64_t tokens_;
  uint64_t columns_;
  uint64_t panel_columns_;
  uint64_t stride_;      // from one token to the next
  uint64_t panel_step_;  // from one panel to the next
  ScratchPool::Lease memory_;
};

}  // namespace zipmoe
