// What lies around the experts of a sparse layer: where rows come from, in which order outputs are summed, what is
// refused.
#include "compute/expert_terms.hpp"

#include <algorithm>
#include <limits>
#include <random>
#include <stdexcept>

#include "compute/bfloat16.hpp"
#include "simd/instruction_set.hpp"
#include "tests/engine_test_support.hpp"

namespace zipmoe {
namespace {

using Words = std::vector<uint16_t>;

Words words(const std::vector<float>& values) {
  Words result;
  for (const float value : values) result.push_back(float_to_bfloat16(value));
  return result;
}

struct Terms {
  std::vector<float> weights;
  std::vector<int64_t> positions;
  uint64_t top_k;

  ExpertTerms get() const { return {weights, positions, top_k}; }
};

// The same on every instruction set and any number of threads.
Words combined(const Terms& terms, const Words& outputs, uint64_t columns) {
  Words expected;
  for (const InstructionSet each : supported_instruction_sets()) {
    for (uint32_t count = 1; count <= 3; ++count) {
      ComputeThreads threads(count);
      Words out(terms.positions.size() / terms.top_k * columns);
      terms.get().combine(outputs.data(), columns, out.data(), simd::weighted_sum(each), threads);
      if (expected.empty()) expected = out;
      CHECK(out == expected);
    }
  }
  return expected;
}

void test_rows_are_those_of_their_tokens() {
  const Terms terms{std::vector<float>(6, 1.0f), {3, 0, 5, 4, 1, 2}, 2};
  terms.get().check(3, 2, 1);
  CHECK(terms.get().tokens_of_rows() == (std::vector<uint64_t>{1, 0, 2, 2, 0, 1}));
}

void test_outputs_are_summed_in_the_order_of_the_choice() {
  // Rows lie in the order of the experts; 2^30 - 2^30 + 1 is 1 in this order only.
  const float large = 0x1p30f;
  const Terms terms{{2.0f, -1.0f, 0.5f, 1.0f, 0.25f, 4.0f}, {2, 5, 0, 4, 1, 3}, 3};
  terms.get().check(2, 1, 2);
  const Words outputs = words({2, 8,          // position 2
                               1, -3,         // 5
                               large / 2, 1,  // 0
                               8, 2,          // 4
                               large, 3,      // 1
                               5, 7});        // 3
  CHECK(combined(terms, outputs, 2) == words({1.0f, 2.0f * 1 - 3 + 0.5f * 8, 5 + 0.25f * 8 + 4, 7 + 0.25f * 2 - 12}));
}

void test_sums_are_rounded_once() {
  const Terms terms{{1.0f, 0x1p-8f, 0x1p-9f}, {0, 1, 2}, 3};
  const Words outputs = words({1, 1, 1});
  CHECK(combined(terms, outputs, 1) == words({1.0f + 0x1p-7f}));  // 1 + 2^-8 alone is a tie, and would be rounded to 1
}

void test_one_token_and_one_expert() {
  const Terms terms{{0.5f}, {0}, 1};
  terms.get().check(1, 3, 3);
  CHECK(terms.get().tokens_of_rows() == std::vector<uint64_t>{0});
  CHECK(combined(terms, words({1, 2, 3}), 3) == words({0.5f, 1.0f, 1.5f}));
}

// Against sums of one value after the other: whole vectors and what is left of them, infinities and NaNs, more tokens
// than one task has.
void test_sums_are_the_same_bits_everywhere() {
  constexpr uint64_t tokens = 300;
  constexpr uint64_t top_k = 3;
  std::mt19937_64 random(1);
  Terms terms{{}, {}, top_k};
  for (uint64_t i = 0; i < tokens * top_k; ++i) {
    terms.weights.push_back(std::normal_distribution<float>()(random));
    terms.positions.push_back(static_cast<int64_t>(i));
  }
  std::shuffle(terms.positions.begin(), terms.positions.end(), random);
  for (const uint64_t columns : {uint64_t{1}, uint64_t{31}, uint64_t{32}, uint64_t{333}}) {
    Words outputs(tokens * top_k * columns);
    for (uint16_t& word : outputs) word = static_cast<uint16_t>(random());
    Words expected(tokens * columns);
    std::vector<uint64_t> row_of(tokens * top_k);
    for (uint64_t row = 0; row < row_of.size(); ++row) row_of[static_cast<uint64_t>(terms.positions[row])] = row;
    for (uint64_t i = 0; i < expected.size(); ++i) {
      volatile float sum = 0.0f;  // nothing is contracted
      for (uint64_t j = i / columns * top_k; j < (i / columns + 1) * top_k; ++j) {
        const volatile float product = terms.weights[j] * bfloat16_to_float(outputs[row_of[j] * columns + i % columns]);
        sum = sum + product;
      }
      expected[i] = float_to_bfloat16(sum);
    }
    CHECK(combined(terms, outputs, columns) == expected);
  }
}

void test_what_does_not_fit_is_refused() {
  const Terms terms{std::vector<float>(4, 1.0f), {2, 0, 3, 1}, 2};
  terms.get().check(2, 8, 8);
  for (const uint64_t tokens : {uint64_t{0}, uint64_t{1}, uint64_t{3}, uint64_t{4}}) {
    EXPECT_ERROR(std::invalid_argument, terms.get().check(tokens, 8, 8));
  }
  EXPECT_ERROR(std::invalid_argument, terms.get().check(2, 0, 8));
  EXPECT_ERROR(std::invalid_argument, terms.get().check(2, 8, 0));
  for (const uint64_t top_k : {uint64_t{0}, uint64_t{1}, uint64_t{3}, uint64_t{4}}) {
    EXPECT_ERROR(std::invalid_argument, (Terms{terms.weights, terms.positions, top_k}.get().check(2, 8, 8)));
  }
  EXPECT_ERROR(std::invalid_argument, (Terms{{}, {}, 2}.get().check(0, 8, 8)));
  EXPECT_ERROR(std::invalid_argument, (Terms{{}, {}, 0}.get().check(2, 8, 8)));
  constexpr int64_t smallest = std::numeric_limits<int64_t>::min();
  constexpr int64_t largest = std::numeric_limits<int64_t>::max();
  const std::vector<std::vector<int64_t>> wrong = {
      {},           {2, 0, 3},     {2, 0, 3, 1, 4},     {2, 0, 3, 3},      {0, 0, 0, 0},
      {2, 0, 3, 4}, {-1, 0, 3, 1}, {2, smallest, 3, 1}, {2, 0, 3, largest}};
  for (const std::vector<int64_t>& positions : wrong) {
    EXPECT_ERROR(std::invalid_argument, (Terms{terms.weights, positions, 2}.get().check(2, 8, 8)));
  }
}

}  // namespace
}  // namespace zipmoe

int main() {
  zipmoe::test_rows_are_those_of_their_tokens();
  zipmoe::test_outputs_are_summed_in_the_order_of_the_choice();
  zipmoe::test_sums_are_rounded_once();
  zipmoe::test_one_token_and_one_expert();
  zipmoe::test_sums_are_the_same_bits_everywhere();
  zipmoe::test_what_does_not_fit_is_refused();
  std::puts("expert_terms_test: ok");
  return 0;
}
