#include "compute/token_inputs.hpp"

#include <algorithm>
#include <stdexcept>

namespace zipmoe {
namespace {

constexpr uint64_t kBlockColumns = 64;

uint64_t require_tokens(uint64_t tokens) {
  if (tokens == 0) throw std::invalid_argument("products need at least one token");
  return tokens;
}

// An odd number of blocks: tokens a multiple of 4 KiB apart would share the same few lines of the cache.
uint64_t padded(uint64_t columns) { return (((columns + kBlockColumns - 1) / kBlockColumns) | 1) * kBlockColumns; }

}  // namespace

TokenInputs::TokenInputs(uint64_t tokens, uint64_t columns, ScratchPool& memory)
    : tokens_(require_tokens(tokens)), columns_(columns), stride_(padded(columns)), memory_(memory, tokens * stride_) {
  for (uint64_t token = 0; token < tokens; ++token) std::fill(row(token) + columns, row(token) + stride_, uint16_t{0});
}

TokenInputs::TokenInputs(const TokenRows& rows, uint64_t tokens, uint64_t columns, ComputeThreads& threads)
    : TokenInputs(tokens, columns, threads.scratch()) {
  constexpr uint64_t task_values = 16 << 10;  // fewer are copied faster than another thread hears of them
  const uint64_t task_tokens = std::max<uint64_t>(1, task_values / stride_);
  threads.run(static_cast<uint32_t>((tokens + task_tokens - 1) / task_tokens), [&](uint32_t task) {
    const uint64_t end = std::min(tokens, (task + 1) * task_tokens);
    for (uint64_t token = task * task_tokens; token < end; ++token) std::copy_n(rows.row(token), columns, row(token));
  });
}

}  // namespace zipmoe
