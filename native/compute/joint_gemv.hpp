// Several products with the same inputs in one step of the threads: queries, keys and values, say.
#pragma once
#include <span>

#include "compute/gemv.hpp"

namespace zipmoe {

struct JointProduct {
  Projection projection;
  GemvOutput output;
};

// The same bits as one by one. Throws std::invalid_argument unless the inputs have as many columns
// as every matrix.
void joint_gemv(std::span<const JointProduct> products, const TokenInputs& inputs, ComputeThreads& threads,
                const simd::GemvKernels& kernels);

}  // namespace zipmoe
