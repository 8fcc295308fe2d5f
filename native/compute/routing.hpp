// Routers of the common shape: scores of a small BF16 matrix, softmax or sigmoid, the k largest.
#pragma once
#include <cstdint>
#include <string_view>

#include "compute/weight_matrix.hpp"

namespace zipmoe {

enum class RouterScore : uint8_t { softmax, sigmoid };

// "softmax", "sigmoid". Throws std::invalid_argument for another name.
RouterScore parse_router_score(std::string_view text);

struct RouterFormula {
  RouterScore score = RouterScore::softmax;
  uint64_t top_k = 1;
  bool normalised = false;  // the weights of the chosen ones are divided by their sum
};

struct RoutedRows {
  uint16_t* logits = nullptr;  // BF16 [rows][experts]
  float* weights = nullptr;    // fp32 [rows][top_k], largest first
  int64_t* experts = nullptr;  // [rows][top_k]
};

// logits = x W^T, rounded to BF16; scores of them in fp32; the experts with the largest logits. x: BF16 [rows][columns
// of W]. Equal logits are ordered as torch.topk orders them. Throws std::invalid_argument for more experts to choose
// than there are.
void route(const WeightMatrix& matrix, const RouterFormula& formula, const uint16_t* x, uint64_t rows,
           const RoutedRows& out, const simd::GemvKernels& kernels);

}  // namespace zipmoe
