// Attention of prompts against the same tokens taken one by one; the same bits on every instruction set with a kernel,
// for every number of threads, and for sequences together or apart. Meant to run under the sanitizers: every buffer has
// exactly the promised length.
#undef NDEBUG
#include "compute/prompt_attention.hpp"

#include <cassert>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <limits>
#include <random>
#include <stdexcept>
#include <vector>

#include "compute/bfloat16.hpp"
#include "simd/instruction_set.hpp"
#include "tests/gaussian_words.hpp"

namespace zipmoe {
namespace {

struct Case {
  AttentionShape shape;
  uint64_t sequences = 1;
  uint64_t tokens = 1;
  uint64_t capacity = 1;
  uint64_t rotated = 0;  // dimensions
  bool same_positions = false;
  bool normed = false;

  Words queries, keys, values, cosines, sines, query_weight, key_weight;

  void fill(uint64_t seed) {
    queries = gaussian(sequences * tokens * shape.query_heads * shape.head_dimension, seed);
    keys = gaussian(sequences * tokens * shape.key_value_heads * shape.head_dimension, seed + 1);
    values = gaussian(keys.size(), seed + 2);
    const uint64_t angles = (same_positions ? 1 : sequences) * tokens * rotated;
    std::mt19937_64 random(seed + 3);
    std::uniform_real_distribution<float> angle(-3.0f, 3.0f);
    for (uint64_t i = 0; i < angles; ++i) {
      const float value = angle(random);
      cosines.push_back(float_to_bfloat16(std::cos(value)));
      sines.push_back(float_to_bfloat16(std::sin(value)));
    }
    query_weight = gaussian(shape.head_dimension, seed + 4, 1.0f, 0.2f);
    key_weight = gaussian(shape.head_dimension, seed + 5, 1.0f, 0.2f);
  }

  uint64_t stride() const { return same_positions ? 0 : tokens * rotated; }
  uint64_t cached() const { return shape.key_value_heads * capacity * shape.head_dimension; }  // of a sequence
  RmsNorm query_norm() const { return normed ? RmsNorm{query_weight.data(), 1e-5f} : RmsNorm{}; }
  RmsNorm key_norm() const { return normed ? RmsNorm{key_weight.data(), 1e-5f} : RmsNorm{}; }
};

// The output and the cache behind it.
struct Result {
  Words out, keys, values;

  explicit Result(const Case& each)
      : out(each.queries.size()), keys(each.sequences * each.cached()), values(each.sequences * each.cached()) {}
  bool operator==(const Result&) const = default;
};

void attend_some(const Case& each, uint64_t sequence, uint64_t count, Result& result, uint32_t threads,
                 InstructionSet instruction_set) {
  ComputeThreads pool(threads);
  const uint64_t queries = sequence * each.tokens * each.shape.query_heads * each.shape.head_dimension;
  const uint64_t keys = sequence * each.tokens * each.shape.key_value_heads * each.shape.head_dimension;
  const uint64_t cached = sequence * each.cached();
  const uint64_t angles = sequence * each.stride();
  const PromptInputs inputs{count,
                            each.tokens,
                            each.queries.data() + queries,
                            each.keys.data() + keys,
                            each.values.data() + keys,
                            each.query_norm(),
                            each.key_norm()};
  attend_prompt(each.shape, inputs,
                {each.cosines.data() + angles, each.sines.data() + angles, each.rotated, each.stride()},
                {result.keys.data() + cached, result.values.data() + cached, 0, each.capacity},
                result.out.data() + queries, pool, simd::prompt_attention(instruction_set));
}

Result attended(const Case& each, uint32_t threads, InstructionSet instruction_set) {
  Result result(each);
  attend_some(each, 0, each.sequences, result, threads, instruction_set);
  return result;
}

Result attended_apart(const Case& each, InstructionSet instruction_set) {
  Result result(each);
  for (uint64_t i = 0; i < each.sequences; ++i) attend_some(each, i, 1, result, 1, instruction_set);
  return result;
}

Result attended_token_by_token(const Case& each) {
  Result result(each);
  ComputeThreads pool(1);
  const uint64_t query_values = each.shape.query_heads * each.shape.head_dimension;
  const uint64_t key_values = each.shape.key_value_heads * each.shape.head_dimension;
  for (uint64_t sequence = 0; sequence < each.sequences; ++sequence) {
    for (uint64_t token = 0; token < each.tokens; ++token) {
      const uint64_t row = sequence * each.tokens + token;
      const uint64_t angles = sequence * each.stride() + token * each.rotated;
      attend(each.shape,
             {1, each.queries.data() + row * query_values, each.keys.data() + row * key_values,
              each.values.data() + row * key_values, each.query_norm(), each.key_norm()},
             {each.cosines.data() + angles, each.sines.data() + angles, each.rotated, 0},
             {result.keys.data() + sequence * each.cached(), result.values.data() + sequence * each.cached(), token,
              each.capacity},
             result.out.data() + row * query_values, pool, simd::attention_kernels(InstructionSet::scalar));
    }
  }
  return result;
}

std::vector<InstructionSet> sets_with_kernels() {
  std::vector<InstructionSet> result;
  for (const InstructionSet each : supported_instruction_sets()) {
    if (simd::prompt_attention(each) != nullptr) result.push_back(each);
  }
  return result;
}

std::vector<Case> cases() {
  std::vector<Case> result;
  const AttentionShape shapes[] = {{1, 1, 16, 0.25f},   {4, 2, 64, 0.125f}, {2, 2, 80, 0.11f},   {6, 2, 96, 0.1f},
                                   {4, 1, 128, 0.088f}, {1, 1, 192, 0.07f}, {2, 1, 256, 0.0625f}};
  uint64_t seed = 1;
  for (const AttentionShape& shape : shapes) {
    for (const uint64_t tokens : {1, 2, 3, 24, 25, 31, 64, 65, 150}) {
      Case each{.shape = shape, .sequences = 1 + seed % 2, .tokens = tokens, .capacity = tokens + seed % 3};
      each.rotated = seed % 4 == 0 ? 0 : seed % 4 == 1 ? shape.head_dimension / 2 : shape.head_dimension;
      each.same_positions = seed % 3 == 0;
      each.normed = seed % 5 != 0;
      each.fill(seed++ * 100);
      result.push_back(std::move(each));
    }
  }
  return result;
}

void test_values_and_bits() {
  for (const Case& each : cases()) {
    const Result steps = attended_token_by_token(each);
    for (const InstructionSet instruction_set : sets_with_kernels()) {
      const Result found = attended(each, 1, instruction_set);
      assert(found.keys == steps.keys && found.values == steps.values);
      double largest = 0.0;
      double error = 0.0;
      for (size_t i = 0; i < steps.out.size(); ++i) {
        const double expected = bfloat16_to_float(steps.out[i]);
        largest = std::max(largest, std::fabs(expected));
        error = std::max(error, std::fabs(bfloat16_to_float(found.out[i]) - expected));
      }
      assert(error <= 0x1p-7 * largest);
      assert(found == attended(each, 1, sets_with_kernels().front()));
      assert(found == attended(each, 3, instruction_set));
      assert(found == attended_apart(each, instruction_set));
    }
  }
}

void test_the_last_tokens_alone_are_the_same() {
  for (const Case& each : cases()) {
    const uint64_t width = each.shape.query_heads * each.shape.head_dimension;
    for (const InstructionSet instruction_set : sets_with_kernels()) {
      const Result whole = attended(each, 1, instruction_set);
      for (const uint64_t query_tokens : {uint64_t{1}, (each.tokens + 1) / 2, each.tokens}) {
        Words queries, expected;
        for (uint64_t end = each.tokens; end <= each.sequences * each.tokens; end += each.tokens) {
          const auto from = static_cast<ptrdiff_t>((end - query_tokens) * width);
          const auto to = static_cast<ptrdiff_t>(end * width);
          queries.insert(queries.end(), each.queries.begin() + from, each.queries.begin() + to);
          expected.insert(expected.end(), whole.out.begin() + from, whole.out.begin() + to);
        }
        Result result(each);
        result.out.resize(expected.size());
        ComputeThreads pool(2);
        attend_prompt(each.shape,
                      {each.sequences, each.tokens, queries.data(), each.keys.data(), each.values.data(),
                       each.query_norm(), each.key_norm(), query_tokens},
                      {each.cosines.data(), each.sines.data(), each.rotated, each.stride()},
                      {result.keys.data(), result.values.data(), 0, each.capacity}, result.out.data(), pool,
                      simd::prompt_attention(instruction_set));
        assert(result.out == expected && result.keys == whole.keys && result.values == whole.values);
      }
    }
  }
}

// Scores that grow from key to key, so that each block has a new largest one, and the reverse.
void test_the_largest_score_moves() {
  for (const float direction : {1.0f, -1.0f}) {
    Case each{.shape = {1, 1, 16, 1.0f}, .tokens = 200, .capacity = 200};
    each.fill(7);
    for (uint64_t token = 0; token < each.tokens; ++token) {
      for (uint64_t i = 0; i < 16; ++i) {
        each.queries[token * 16 + i] = float_to_bfloat16(i == 0 ? 1.0f : 0.0f);
        each.keys[token * 16 + i] = float_to_bfloat16(i == 0 ? direction * 4.0f * static_cast<float>(token) : 0.0f);
      }
    }
    for (const InstructionSet instruction_set : sets_with_kernels()) {
      const Result found = attended(each, 2, instruction_set);
      const uint64_t last = each.tokens - 1;
      const uint64_t chosen = direction > 0 ? last : 0;
      for (uint64_t i = 0; i < 16; ++i) {
        const double expected = bfloat16_to_float(each.values[chosen * 16 + i]);
        const uint64_t next = direction > 0 ? last - 1 : 1;
        const double other = bfloat16_to_float(each.values[next * 16 + i]);
        const double mixed = (expected + std::exp(-4.0) * other) / (1.0 + std::exp(-4.0));
        assert(std::fabs(bfloat16_to_float(found.out[last * 16 + i]) - mixed) < 0.03);
      }
    }
  }
}

void test_what_is_not_finite_or_denormal() {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  for (const float odd : {nan, std::numeric_limits<float>::infinity(), 1e-39f}) {
    Case each{.shape = {2, 1, 32, 0.2f}, .tokens = 90, .capacity = 90};
    each.fill(11);
    each.keys[70 * 32 + 3] = float_to_bfloat16(odd);
    each.queries[10 * 64 + 5] = float_to_bfloat16(odd);
    const Result first = attended(each, 1, sets_with_kernels().front());
    for (const InstructionSet instruction_set : sets_with_kernels()) {
      assert(attended(each, 2, instruction_set) == first);
    }
    for (uint64_t token = 0; token < each.tokens; ++token) {
      for (uint64_t i = 0; i < 64; ++i) {
        const float value = bfloat16_to_float(first.out[token * 64 + i]);
        const bool affected = token >= 70 || (token == 10 && i < 32);
        if (!affected || odd == 1e-39f) assert(std::isfinite(value));
        if (odd != odd && affected) assert(first.out[token * 64 + i] == 0x7FC0);
      }
    }
  }
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

void test_what_is_refused() {
  Case each{.shape = {2, 1, 16, 0.25f}, .tokens = 4, .capacity = 4};
  each.fill(3);
  uint64_t query_tokens = 4;
  const auto attempt = [&query_tokens](const Case& given, uint64_t length, simd::PromptAttention kernel) {
    Result result(given);
    ComputeThreads pool(1);
    const PromptInputs inputs{1, 4, given.queries.data(), given.keys.data(), given.values.data(), {}, {}, query_tokens};
    attend_prompt(given.shape, inputs, {nullptr, nullptr, given.rotated, 0},
                  {result.keys.data(), result.values.data(), length, given.capacity}, result.out.data(), pool, kernel);
  };
  const simd::PromptAttention kernel = simd::prompt_attention(best_instruction_set());
  attempt(each, 0, kernel);
  assert(refused([&] { attempt(each, 1, kernel); }));
  assert(refused([&] { attempt(each, 0, nullptr); }));
  query_tokens = 5;
  assert(refused([&] { attempt(each, 0, kernel); }));
  query_tokens = 4;
  const auto changed = [&](auto change) {
    Case other = each;
    change(other);
    return refused([&] { attempt(other, 0, kernel); });
  };
  assert(changed([](Case& other) { other.capacity = 3; }));
  assert(changed([](Case& other) { other.rotated = 3; }));
  assert(changed([](Case& other) { other.rotated = 18; }));
  assert(changed([](Case& other) { other.shape.head_dimension = 8; }));
  assert(changed([](Case& other) { other.shape.key_value_heads = 3; }));
}

}  // namespace
}  // namespace zipmoe

int main() {
  if (zipmoe::sets_with_kernels().empty()) {
    std::puts("attention of prompts: no kernel for this machine");
    return 0;
  }
  zipmoe::test_values_and_bits();
  zipmoe::test_the_last_tokens_alone_are_the_same();
  zipmoe::test_the_largest_score_moves();
  zipmoe::test_what_is_not_finite_or_denormal();
  zipmoe::test_what_is_refused();
  std::puts("attention of prompts: ok");
}
