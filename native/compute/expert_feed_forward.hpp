// Feed-forward networks of experts, from the first matrix to the output, for the tokens that each has.
#pragma once
#include <cstdint>
#include <optional>
#include <span>

#include "compute/activation.hpp"
#include "compute/gemv.hpp"

namespace zipmoe {

// y = down(activation(first(x))). Inputs, and what lies between the matrices, are BF16.
struct ExpertFeedForward {
  // With a gate: gate and up in one matrix of 2 * intermediate rows, in GatedActivation's layout, or, where `up` is
  // there, the gate alone. Without a gate: the matrix of `intermediate` rows.
  Projection first;
  std::optional<Projection> up;
  Projection down;

  TokenRows x;  // BF16 [..][hidden], of which `tokens` are taken
  uint64_t tokens;
  GemvOutput output;
};

// All experts in two steps that the threads share: first matrices with activations, then down. The results are the same
// bits on every instruction set and for every number of threads. Throws std::invalid_argument where shapes do not fit.
void compute_experts(std::span<const ExpertFeedForward> experts, const GatedActivation& activation,
                     ComputeThreads& threads, const simd::GemvKernels& kernels);

}  // namespace zipmoe
