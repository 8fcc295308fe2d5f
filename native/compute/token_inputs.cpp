#include "compute/token_inputs.hpp"

#include <algorithm>
#include <stdexcept>

#include "codec/fx3_layout.hpp"

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
    : tokens_(require_tokens(tokens)),
      columns_(columns),
      panel_columns_(Fx3Layout::of({1, columns}).panel_columns),
      stride_(padded(panel_columns_)),
      panel_step_(tokens * stride_),
      memory_(memory, (columns + panel_columns_ - 1) / panel_columns_ * panel_step_) {
  if (columns % kBlockColumns == 0) return;
  for (uint64_t token = 0; token < tokens; ++token) {
    uint16_t* const end = piece(token, columns - 1).data() + 1;
    std::fill_n(end, kBlockColumns - columns % kBlockColumns, uint16_t{0});
  }
}

TokenInputs::TokenInputs(const TokenRows& rows, uint64_t tokens, uint64_t columns, ComputeThreads& threads)
    : TokenInputs(tokens, columns, threads.scratch()) {
  constexpr uint64_t task_values = 16 << 10;  // fewer are copied faster than another thread hears of them
  const uint64_t task_tokens = std::max<uint64_t>(1, task_values / stride_);
  threads.run(static_cast<uint32_t>((tokens + task_tokens - 1) / task_tokens), [&](uint32_t task) {
    const uint64_t end = std::min(tokens, (task + 1) * task_tokens);
    for (uint64_t token = task * task_tokens; token < end; ++token) write(token, rows.row(token));
  });
}

void TokenInputs::write(uint64_t token, const uint16_t* values) {
  for (uint64_t column = 0; column < columns_;) {
    const std::span<uint16_t> to = piece(token, column);
    std::copy_n(values + column, to.size(), to.data());
    column += to.size();
  }
}

}  // namespace zipmoe
