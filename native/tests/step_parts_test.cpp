// Norms, routers and joint products: values against double precision, the same bits however rows and threads divide.
#undef NDEBUG
#include <algorithm>
#include <cassert>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <numeric>
#include <random>
#include <stdexcept>
#include <vector>

#include "compute/bfloat16.hpp"
#include "compute/joint_gemv.hpp"
#include "compute/rms_norm.hpp"
#include "compute/routing.hpp"
#include "simd/instruction_set.hpp"

namespace zipmoe {
namespace {

using Words = std::vector<uint16_t>;

Words gaussian(uint64_t count, uint64_t seed, float deviation) {
  std::mt19937_64 random(seed);
  std::normal_distribution<float> normal(0.0f, deviation);
  Words words(count);
  for (uint16_t& word : words) word = float_to_bfloat16(normal(random));
  return words;
}

template <typename Call>
bool refused(const Call& call) {
  try {
    call();
  } catch (const std::invalid_argument&) {
    return true;
  }
  return false;
}

void test_norms(const simd::NormKernels& kernels, std::vector<Words>& results) {
  ComputeThreads threads(3);
  for (const uint64_t size : {1, 7, 8, 13, 64, 2048, 4097}) {
    for (const float scale : {1e-5f, 1.0f, 1e4f}) {
      constexpr uint64_t rows = 7;
      const Words x = gaussian(rows * size, size, scale);
      const Words weight = gaussian(size, size + 1, 1.0f);
      const RmsNorm norm{weight.data(), 1e-6f};
      Words together(x.size());
      rms_norm(norm, x.data(), rows, size, together.data(), kernels);
      Words on_threads(x.size());
      rms_norm(norm, x.data(), rows, size, on_threads.data(), kernels, threads);
      assert(on_threads == together);
      results.push_back(together);
      for (uint64_t row = 0; row < rows; ++row) {
        Words alone(size);
        rms_norm(norm, x.data() + row * size, 1, size, alone.data(), kernels);
        double squares = 0.0;
        for (uint64_t i = 0; i < size; ++i) squares += std::pow(bfloat16_to_float(x[row * size + i]), 2.0);
        const double factor = 1.0 / std::sqrt(squares / static_cast<double>(size) + 1e-6f);
        for (uint64_t i = 0; i < size; ++i) {
          assert(alone[i] == together[row * size + i]);
          const double expected = bfloat16_to_float(x[row * size + i]) * factor * bfloat16_to_float(weight[i]);
          assert(std::fabs(bfloat16_to_float(alone[i]) - expected) <= 0x1.01p-8 * std::fabs(expected));
        }
      }
    }
  }
  Words in_place = gaussian(16, 3, 1.0f);
  const Words before = in_place, weight = gaussian(16, 4, 1.0f);
  Words apart(16);
  rms_norm({weight.data(), 0.1f}, before.data(), 1, 16, apart.data(), kernels);
  rms_norm({weight.data(), 0.1f}, in_place.data(), 1, 16, in_place.data(), kernels);
  assert(in_place == apart);
}

void test_norms() {
  std::vector<Words> expected;
  test_norms(simd::norm_kernels(InstructionSet::scalar), expected);
  for (const InstructionSet instruction_set : supported_instruction_sets()) {
    std::vector<Words> found;
    test_norms(simd::norm_kernels(instruction_set), found);
    assert(found == expected);
  }
}

struct Routed {
  Words logits;
  std::vector<float> weights;
  std::vector<int64_t> experts;
  bool operator==(const Routed&) const = default;
};

Routed routed(const Words& matrix, MatrixShape shape, const RouterFormula& formula, const uint16_t* x, uint64_t rows,
              InstructionSet instruction_set) {
  Routed result{Words(rows * shape.rows), std::vector<float>(rows * formula.top_k),
                std::vector<int64_t>(rows * formula.top_k)};
  route(WeightMatrix::bfloat16(matrix, shape), formula, x, rows,
        {result.logits.data(), result.weights.data(), result.experts.data()}, simd::gemv_kernels(instruction_set));
  return result;
}

void check_routes(const Routed& found, const RouterFormula& formula, uint64_t experts, uint64_t rows) {
  for (uint64_t row = 0; row < rows; ++row) {
    std::vector<double> logits(experts), scores(experts);
    for (uint64_t i = 0; i < experts; ++i) logits[i] = bfloat16_to_float(found.logits[row * experts + i]);
    double sum = 0.0;
    for (uint64_t i = 0; i < experts; ++i) {
      sum += std::exp(logits[i]);
      scores[i] = 1.0 / (1.0 + std::exp(-logits[i]));
    }
    if (formula.score == RouterScore::softmax) {
      for (uint64_t i = 0; i < experts; ++i) scores[i] = std::exp(logits[i]) / sum;
    }
    std::vector<double> sorted = logits;
    std::sort(sorted.begin(), sorted.end(), std::greater<>());
    double chosen = 0.0;
    std::vector<bool> taken(experts);
    for (uint64_t i = 0; i < formula.top_k; ++i) {
      const auto expert = static_cast<uint64_t>(found.experts[row * formula.top_k + i]);
      assert(expert < experts && !taken[expert]);
      taken[expert] = true;
      assert(logits[expert] == sorted[i]);  // the largest ones, in order
      chosen += scores[expert];
    }
    for (uint64_t i = 0; i < formula.top_k; ++i) {
      const uint64_t at = row * formula.top_k + i;
      const double expected = scores[static_cast<uint64_t>(found.experts[at])] / (formula.normalised ? chosen : 1.0);
      assert(std::fabs(found.weights[at] - expected) <= 1e-5 * expected);
    }
  }
}

void test_routers() {
  struct Size {
    uint64_t experts, columns, top_k;
  };
  for (const auto [experts, columns, top_k] : {Size{8, 64, 3}, {1, 70, 1}, {5, 33, 5}, {128, 512, 8}, {600, 64, 2}}) {
    constexpr uint64_t rows = 7;
    const Words matrix = gaussian(experts * columns, experts, 0.1f);
    const Words x = gaussian(rows * columns, columns, 1.5f);
    for (const RouterScore score : {RouterScore::softmax, RouterScore::sigmoid}) {
      for (const bool normalised : {false, true}) {
        const RouterFormula formula{score, top_k, normalised};
        const Routed expected = routed(matrix, {experts, columns}, formula, x.data(), rows, InstructionSet::scalar);
        check_routes(expected, formula, experts, rows);
        for (const InstructionSet each : supported_instruction_sets()) {
          assert(routed(matrix, {experts, columns}, formula, x.data(), rows, each) == expected);
        }
        for (uint64_t row = 0; row < rows; ++row) {
          const Routed alone =
              routed(matrix, {experts, columns}, formula, x.data() + row * columns, 1, InstructionSet::scalar);
          assert(std::equal(alone.experts.begin(), alone.experts.end(),
                            expected.experts.begin() + static_cast<ptrdiff_t>(row * top_k)));
          assert(std::equal(alone.weights.begin(), alone.weights.end(),
                            expected.weights.begin() + static_cast<ptrdiff_t>(row * top_k)));
        }
      }
    }
    for (const uint64_t wrong : {uint64_t{0}, experts + 1}) {
      const RouterFormula formula{RouterScore::softmax, wrong, false};
      assert(refused([&] { routed(matrix, {experts, columns}, formula, x.data(), 1, InstructionSet::scalar); }));
    }
  }
  assert(refused([] { parse_router_score("tanh"); }));
}

// Sigmoids of 20 and 30 are both 1 in fp32.
void test_large_logits_are_told_apart() {
  const MatrixShape shape{4, 1};
  Words matrix;
  for (const float logit : {18.0f, 30.0f, 20.0f, -30.0f}) matrix.push_back(float_to_bfloat16(logit));
  const Words x = {float_to_bfloat16(1.0f)};
  const Routed found = routed(matrix, shape, {RouterScore::sigmoid, 2, false}, x.data(), 1, InstructionSet::scalar);
  assert(found.experts == (std::vector<int64_t>{1, 2}));
  assert(found.weights[0] == 1.0f && found.weights[1] == 1.0f);
}

void test_joint_products() {
  const MatrixShape shapes[] = {{130, 192}, {1, 192}, {700, 192}};
  const Words x = gaussian(2 * 192, 5, 1.0f);
  for (const InstructionSet instruction_set : supported_instruction_sets()) {
    const auto& kernels = simd::gemv_kernels(instruction_set);
    for (const uint32_t count : {1u, 2u}) {
      ComputeThreads threads(count);
      const TokenInputs inputs({x.data(), 192}, 2, 192, threads);
      std::vector<Words> matrices, biases, together, apart;
      std::vector<JointProduct> joint;
      for (const MatrixShape shape : shapes) {
        matrices.push_back(gaussian(shape.rows * shape.columns, shape.rows, 0.1f));
        biases.push_back(gaussian(shape.rows, shape.rows + 1, 1.0f));
        together.emplace_back(2 * shape.rows);
        apart.emplace_back(2 * shape.rows);
      }
      for (size_t i = 0; i < std::size(shapes); ++i) {
        const Projection projection{WeightMatrix::bfloat16(matrices[i], shapes[i]), biases[i].data()};
        joint.push_back({projection, {.bfloat16 = together[i].data(), .stride = shapes[i].rows}});
        gemv(projection, inputs, {.bfloat16 = apart[i].data(), .stride = shapes[i].rows}, threads, kernels);
      }
      joint_gemv(joint, inputs, threads, kernels);
      assert(together == apart);
      const TokenInputs narrow({x.data(), 191}, 1, 191, threads);
      assert(refused([&] { joint_gemv(joint, narrow, threads, kernels); }));
    }
  }
}

}  // namespace
}  // namespace zipmoe

int main() {
  zipmoe::test_norms();
  zipmoe::test_routers();
  zipmoe::test_large_logits_are_told_apart();
  zipmoe::test_joint_products();
  std::puts("parts of a step: ok");
}
