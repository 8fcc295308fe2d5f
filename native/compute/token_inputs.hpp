// Inputs of tokens as the kernels want them: aligned, and padded with zeros to whole blocks of columns.
#pragma once
#include <cstdint>

#include "compute/compute_threads.hpp"
#include "compute/scratch_pool.hpp"
#include "simd/gemv_kernels.hpp"

namespace zipmoe {

// Rows of BF16 patterns, `stride` values from one to the next: all of them in order, or those with these numbers.
struct TokenRows {
  const uint16_t* x = nullptr;
  uint64_t stride = 0;
  const uint64_t* numbers = nullptr;

  const uint16_t* row(uint64_t token) const { return x + (numbers == nullptr ? token : numbers[token]) * stride; }
};

class TokenInputs {
 public:
  // Whose values are still to be written. Throws std::invalid_argument for no tokens. The memory is the pool's.
  TokenInputs(uint64_t tokens, uint64_t columns, ScratchPool& memory);
  // Copies `columns` values of each row, on the threads and into their scratch memory.
  TokenInputs(const TokenRows& rows, uint64_t tokens, uint64_t columns, ComputeThreads& threads);

  uint64_t tokens() const { return tokens_; }
  uint64_t columns() const { return columns_; }
  uint16_t* row(uint64_t token) { return memory_.values() + token * stride_; }  // `columns` values

  // Of the tokens [begin, end) from a column on, which is a multiple of 64.
  simd::GemvInputs from(uint64_t column, uint64_t begin, uint64_t end) const {
    return {memory_.values() + begin * stride_ + column, stride_, end - begin};
  }

 private:
  uint64_t tokens_;
  uint64_t columns_;
  uint64_t stride_;
  ScratchPool::Lease memory_;
};

}  // namespace zipmoe
