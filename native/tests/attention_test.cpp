// Attention of new tokens against a straightforward computation in double precision; the same bits on every instruction
// set, for every number of threads, and for rows together or apart. Meant to run under the sanitizers: every buffer has
// exactly the promised length.
#undef NDEBUG
#include "compute/attention.hpp"

#include <cassert>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <limits>
#include <random>
#include <stdexcept>
#include <vector>

#include "compute/bfloat16.hpp"
#include "simd/instruction_set.hpp"
#include "tests/gaussian_words.hpp"

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace zipmoe {
namespace {

// One call: its inputs, and the cache with `length` positions of `capacity`.
struct Case {
  AttentionShape shape;
  uint64_t rows = 1;
  uint64_t length = 0;
  uint64_t capacity = 1;
  uint64_t rotated = 0;  // dimensions
  bool one_position = false;
  bool normed = false;

  Words queries, keys, values, cosines, sines, query_weight, key_weight, cached_keys, cached_values;

  static constexpr float epsilon = 1e-5f;

  void fill(uint64_t seed) {
    queries = gaussian(rows * shape.query_heads * shape.head_dimension, seed);
    keys = gaussian(rows * shape.key_value_heads * shape.head_dimension, seed + 1);
    values = gaussian(keys.size(), seed + 2);
    const uint64_t angles = (one_position ? 1 : rows) * rotated;
    cosines.resize(angles);
    sines.resize(angles);
    std::mt19937_64 random(seed + 3);
    std::uniform_real_distribution<float> angle(-3.0f, 3.0f);
    for (uint64_t i = 0; i < angles; ++i) {
      const float value = angle(random);
      cosines[i] = float_to_bfloat16(std::cos(value));
      sines[i] = float_to_bfloat16(std::sin(value));
    }
    query_weight = gaussian(shape.head_dimension, seed + 4, 1.0f, 0.2f);
    key_weight = gaussian(shape.head_dimension, seed + 5, 1.0f, 0.2f);
    cached_keys = gaussian(rows * shape.key_value_heads * capacity * shape.head_dimension, seed + 6);
    cached_values = gaussian(cached_keys.size(), seed + 7);
  }

  RotaryPositions positions(uint64_t row = 0) const {
    if (rotated == 0) return {};
    const uint64_t stride = one_position ? 0 : rotated;
    return {cosines.data() + row * stride, sines.data() + row * stride, rotated, stride};
  }

  AttentionInputs inputs(uint64_t row, uint64_t count) const {
    AttentionInputs result{.rows = count,
                           .queries = queries.data() + row * shape.query_heads * shape.head_dimension,
                           .keys = keys.data() + row * shape.key_value_heads * shape.head_dimension,
                           .values = values.data() + row * shape.key_value_heads * shape.head_dimension,
                           .query_norm = {},
                           .key_norm = {}};
    if (normed) {
      result.query_norm = {query_weight.data(), epsilon};
      result.key_norm = {key_weight.data(), epsilon};
    }
    return result;
  }
};

// What a call gives: the output and the cache behind it.
struct Result {
  Words out, keys, values;
  bool operator==(const Result&) const = default;
};

Result attended(const Case& each, uint32_t threads, InstructionSet instruction_set) {
  Result result{Words(each.queries.size()), each.cached_keys, each.cached_values};
  ComputeThreads pool(threads);
  attend(each.shape, each.inputs(0, each.rows), each.positions(),
         {result.keys.data(), result.values.data(), each.length, each.capacity}, result.out.data(), pool,
         simd::attention_kernels(instruction_set));
  return result;
}

Result attended_row_by_row(const Case& each) {
  Result result{Words(each.queries.size()), each.cached_keys, each.cached_values};
  ComputeThreads pool(1);
  const uint64_t cached = each.shape.key_value_heads * each.capacity * each.shape.head_dimension;
  for (uint64_t row = 0; row < each.rows; ++row) {
    attend(each.shape, each.inputs(row, 1), each.positions(row),
           {result.keys.data() + row * cached, result.values.data() + row * cached, each.length, each.capacity},
           result.out.data() + row * each.shape.query_heads * each.shape.head_dimension, pool,
           simd::attention_kernels(InstructionSet::scalar));
  }
  return result;
}

// Norm and rotation in double precision.
std::vector<double> prepared(const uint16_t* from, uint64_t size, const uint16_t* weight, const Case& each,
                             uint64_t row) {
  std::vector<double> out(size);
  for (uint64_t i = 0; i < size; ++i) out[i] = bfloat16_to_float(from[i]);
  if (each.normed) {
    double squares = 0.0;
    for (const double value : out) squares += value * value;
    const double scale = 1.0 / std::sqrt(squares / static_cast<double>(size) + Case::epsilon);
    for (uint64_t i = 0; i < size; ++i) out[i] *= scale * bfloat16_to_float(weight[i]);
  }
  const std::vector<double> x = out;
  const RotaryPositions positions = each.positions(row);
  const uint64_t half = each.rotated / 2;
  for (uint64_t i = 0; i < each.rotated; ++i) {
    const double cosine = bfloat16_to_float(positions.cosines[i]);
    const double sine = bfloat16_to_float(positions.sines[i]);
    out[i] = i < half ? x[i] * cosine - x[i + half] * sine : x[i] * cosine + x[i - half] * sine;
  }
  return out;
}

// The largest error of the output, relative to the largest value, if keys are rounded to BF16 in the cache.
double largest_error(const Case& each, const Result& found) {
  const auto [query_heads, key_value_heads, size, scale] = each.shape;
  double error = 0.0;
  double largest = 0.0;
  for (uint64_t row = 0; row < each.rows; ++row) {
    for (uint64_t head = 0; head < query_heads; ++head) {
      const uint64_t shared = row * key_value_heads + head / (query_heads / key_value_heads);
      const uint64_t at = (row * query_heads + head) * size;
      const auto query = prepared(each.queries.data() + at, size, each.query_weight.data(), each, row);
      const auto key = prepared(each.keys.data() + shared * size, size, each.key_weight.data(), each, row);
      std::vector<double> weights(each.length + 1);
      double sum = 0.0;
      for (uint64_t position = 0; position <= each.length; ++position) {
        double score = 0.0;
        for (uint64_t i = 0; i < size; ++i) {
          const uint64_t entry = (shared * each.capacity + position) * size + i;
          score += query[i] * (position < each.length ? bfloat16_to_float(each.cached_keys[entry]) : key[i]);
        }
        sum += weights[position] = std::exp(score * scale);
      }
      for (uint64_t i = 0; i < size; ++i) {
        double value = 0.0;
        for (uint64_t position = 0; position <= each.length; ++position) {
          const uint64_t entry = (shared * each.capacity + position) * size + i;
          const uint16_t word = position < each.length ? each.cached_values[entry] : each.values[shared * size + i];
          value += weights[position] / sum * bfloat16_to_float(word);
        }
        error = std::max(error, std::fabs(value - bfloat16_to_float(found.out[at + i])));
        largest = std::max(largest, std::fabs(value));
      }
    }
  }
  return error / largest;
}

std::vector<Case> cases() {
  std::vector<Case> result;
  const AttentionShape shapes[] = {
      {1, 1, 16, 0.25f}, {4, 2, 16, 0.25f}, {6, 2, 48, 0.1f}, {4, 4, 64, 0.125f}, {8, 1, 128, 0.09f}};
  uint64_t seed = 1;
  for (const AttentionShape& shape : shapes) {
    for (const uint64_t rows : {1, 3}) {
      for (const uint64_t length : {0, 1, 4, 37}) {
        Case each{.shape = shape, .rows = rows, .length = length, .capacity = length + 1 + seed % 3};
        each.rotated = seed % 4 == 0 ? 0 : seed % 4 == 1 ? shape.head_dimension / 2 : shape.head_dimension;
        each.one_position = seed % 2 == 0;
        each.normed = seed % 3 != 0;
        each.fill(seed++ * 100);
        result.push_back(std::move(each));
      }
    }
  }
  return result;
}

void test_values_and_bits() {
  for (const Case& each : cases()) {
    const Result expected = attended(each, 1, InstructionSet::scalar);
    // One rounding of the output, one of queries and keys before their product.
    assert(largest_error(each, expected) < 0.02);
    for (const InstructionSet instruction_set : supported_instruction_sets()) {
      for (const uint32_t threads : {1u, 2u}) assert(attended(each, threads, instruction_set) == expected);
    }
    assert(attended_row_by_row(each) == expected);
  }
}

void test_only_the_new_entry_is_written() {
  for (const Case& each : cases()) {
    const Result found = attended(each, 2, InstructionSet::scalar);
    const uint64_t size = each.shape.head_dimension;
    for (uint64_t head = 0; head < each.rows * each.shape.key_value_heads; ++head) {
      const auto key = prepared(each.keys.data() + head * size, size, each.key_weight.data(), each,
                                head / each.shape.key_value_heads);
      for (uint64_t position = 0; position < each.capacity; ++position) {
        for (uint64_t i = 0; i < size; ++i) {
          const uint64_t entry = (head * each.capacity + position) * size + i;
          if (position != each.length) {
            assert(found.keys[entry] == each.cached_keys[entry] && found.values[entry] == each.cached_values[entry]);
            continue;
          }
          assert(found.values[entry] == each.values[head * size + i]);
          assert(std::fabs(bfloat16_to_float(found.keys[entry]) - key[i]) <= 0x1p-8 * std::fabs(key[i]) + 1e-4);
        }
      }
    }
  }
}

void test_one_key_outweighs_all_others() {
  Case each{.shape = {2, 1, 32, 1.0f}, .rows = 1, .length = 20, .capacity = 21};
  each.fill(9);
  for (uint64_t i = 0; i < 32; ++i) {  // scores of 32 * 16 * 16: exponentials of the others are zero
    each.queries[i] = each.queries[32 + i] = float_to_bfloat16(16.0f);
    each.cached_keys[7 * 32 + i] = float_to_bfloat16(16.0f);
  }
  for (const InstructionSet instruction_set : supported_instruction_sets()) {
    const Result found = attended(each, 1, instruction_set);
    for (uint64_t i = 0; i < 64; ++i) assert(found.out[i] == each.cached_values[7 * 32 + i % 32]);
  }
}

void test_nan_and_infinity_are_the_same_everywhere() {
  for (const float special : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity(),
                              -std::numeric_limits<float>::infinity()}) {
    for (int where = 0; where < 3; ++where) {
      Case each{.shape = {4, 2, 16, 0.25f}, .rows = 2, .length = 9, .capacity = 10, .rotated = 16};
      each.fill(77);
      Words& words = where == 0 ? each.queries : where == 1 ? each.cached_keys : each.cached_values;
      words[5] = float_to_bfloat16(special);
      const Result expected = attended(each, 1, InstructionSet::scalar);
      bool shows = false;
      for (const uint16_t word : expected.out) {
        shows = shows || !std::isfinite(bfloat16_to_float(word));
        assert(!std::isnan(bfloat16_to_float(word)) || word == 0x7FC0);
      }
      assert(shows);
      for (const InstructionSet instruction_set : supported_instruction_sets()) {
        assert(attended(each, 2, instruction_set) == expected);
      }
    }
  }
}

void test_the_callers_floating_point_environment_does_not_matter() {
#if defined(__x86_64__)
  Case each{.shape = {4, 2, 16, 0x1p-20f}, .rows = 1, .length = 5, .capacity = 6};
  each.fill(31);
  for (uint16_t& word : each.cached_keys) word = float_to_bfloat16(bfloat16_to_float(word) * 0x1p-115f);
  const Result expected = attended(each, 1, InstructionSet::scalar);
  const unsigned saved = _mm_getcsr();
  _mm_setcsr(saved | 0x8040);  // flush to zero, denormals are zero
  const Result found = attended(each, 1, InstructionSet::scalar);
  _mm_setcsr(saved);
  assert(found == expected);
#endif
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

void test_refusals() {
  Case each{.shape = {4, 2, 16, 0.25f}, .rows = 1, .length = 3, .capacity = 4, .rotated = 16};
  each.fill(5);
  const auto call = [&](const auto& change) {
    Case changed = each;
    change(changed);
    return refused([&] { attended(changed, 1, InstructionSet::scalar); });
  };
  assert(!call([](Case&) {}));
  assert(call([](Case& c) { c.length = 4; }));  // full
  assert(call([](Case& c) { c.shape.query_heads = 3; }));
  assert(call([](Case& c) { c.shape.key_value_heads = 0; }));
  assert(call([](Case& c) { c.shape.head_dimension = 24; }));
  assert(call([](Case& c) { c.shape.head_dimension = 0; }));
  assert(call([](Case& c) { c.rotated = 15; }));
  assert(call([](Case& c) { c.rotated = 18; }));
}

}  // namespace
}  // namespace zipmoe

int main() {
  zipmoe::test_values_and_bits();
  zipmoe::test_only_the_new_entry_is_written();
  zipmoe::test_one_key_outweighs_all_others();
  zipmoe::test_nan_and_infinity_are_the_same_everywhere();
  zipmoe::test_the_callers_floating_point_environment_does_not_matter();
  zipmoe::test_refusals();
  std::puts("attention: ok");
}
