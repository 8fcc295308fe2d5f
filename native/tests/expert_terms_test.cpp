// What lies around the experts of a sparse layer: where rows come from, in which order outputs are summed, what is
// refused.
#include "compute/expert_terms.hpp"

#include <limits>
#include <stdexcept>

#include "compute/bfloat16.hpp"
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

void test_rows_are_those_of_their_tokens() {
  const Terms terms{std::vector<float>(6, 1.0f), {3, 0, 5, 4, 1, 2}, 2};
  terms.get().check(3, 2, 1);
  const Words x = words({1, 2, 3, 4, 5, 6});
  Words rows(12);
  terms.get().gather(x.data(), 2, rows.data());
  CHECK(rows == words({3, 4, 1, 2, 5, 6, 5, 6, 1, 2, 3, 4}));
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
  Words out(4);
  terms.get().combine(outputs.data(), 2, out.data());
  CHECK(out == words({1.0f, 2.0f * 1 - 3 + 0.5f * 8, 5 + 0.25f * 8 + 4, 7 + 0.25f * 2 - 12}));
}

void test_sums_are_rounded_once() {
  const Terms terms{{1.0f, 0x1p-8f, 0x1p-9f}, {0, 1, 2}, 3};
  const Words outputs = words({1, 1, 1});
  Words out(1);
  terms.get().combine(outputs.data(), 1, out.data());
  CHECK(out == words({1.0f + 0x1p-7f}));  // 1 + 2^-8 alone is a tie, and would be rounded to 1
}

void test_one_token_and_one_expert() {
  const Terms terms{{0.5f}, {0}, 1};
  terms.get().check(1, 3, 3);
  const Words x = words({1, 2, 3});
  Words rows(3), out(3);
  terms.get().gather(x.data(), 3, rows.data());
  CHECK(rows == x);
  terms.get().combine(rows.data(), 3, out.data());
  CHECK(out == words({0.5f, 1.0f, 1.5f}));
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
  zipmoe::test_what_does_not_fit_is_refused();
  std::puts("expert_terms_test: ok");
  return 0;
}
