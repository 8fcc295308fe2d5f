// The kernel of prompt_attention_kernels.hpp, but for the products of pairs: a `Tile` of the translation unit that
// includes this has them, and ZIPMOE_VECTOR_CODE marks the functions (wide_code.hpp).
#pragma once
#include "simd/lane_vectors.hpp"
#include "simd/prompt_attention_kernels.hpp"

namespace zipmoe::simd {
namespace {

// Sums of products of pairs: sums[row][16 vector + i] = (those of `add` +) pair after pair of left[row][pair] times
// right[pair][16 vector + i].
struct PairProducts {
  const uint16_t* left;  // [rows][pairs][2]
  uint64_t left_stride;  // values from one row to the next
  const uint16_t* right;
  uint64_t right_pair_stride;    // values from one pair to the next
  uint64_t right_vector_stride;  // values from one vector to the next
  uint64_t pairs;
  float* sums;
  uint64_t sums_stride;
};

typedef int32_t Integers16 __attribute__((vector_size(64)));

constexpr uint64_t kKeyVectors = kPromptKeys / kPromptKeyVector;

ZIPMOE_VECTOR_CODE inline __attribute__((always_inline)) void spread(float value, Floats16& out) {
  out = value - Floats16{};
}

// As `exponential` of activation_body.hpp, for x that are not above 0, or NaN.
ZIPMOE_VECTOR_CODE inline __attribute__((always_inline)) void exponential_of_negatives(Floats16& x) {
  constexpr float lowest = -87.33654f;
  constexpr float rounder = 0x1.8p23f;  // adding it rounds to an integer, which the low bits then hold
  Floats16 least;
  spread(lowest, least);
  const Integers16 below = x < least;
  const Floats16 bounded = below ? least : x;
  const Floats16 shifted = bounded * 0x1.715476p0f + rounder;
  const Floats16 n = shifted - rounder;
  const Floats16 r = (bounded - n * 0x1.62e4p-1f) - n * 0x1.7f7d1cp-20f;
  Floats16 p = r * 1.3981999e-3f + 8.3334519e-3f;
  p = p * r + 4.1665895e-2f;
  p = p * r + 1.6666666e-1f;
  p = p * r + 0.5f;
  const Floats16 fraction = (p * r) * r + r + 1.0f;
  const Integers16 exponent = ((Integers16)shifted - __builtin_bit_cast(int32_t, rounder) + 127) << 23;
  const Floats16 result = fraction * (Floats16)exponent;
  x = below ? Floats16{} : result;
}

ZIPMOE_VECTOR_CODE inline __attribute__((always_inline)) float largest_of_lanes(const Floats16& lanes) {
  const Floats8 low = __builtin_shufflevector(lanes, lanes, 0, 1, 2, 3, 4, 5, 6, 7);
  const Floats8 high = __builtin_shufflevector(lanes, lanes, 8, 9, 10, 11, 12, 13, 14, 15);
  const Floats8 eight = low > high ? low : high;
  const Floats4 front = __builtin_shufflevector(eight, eight, 0, 1, 2, 3);
  const Floats4 back = __builtin_shufflevector(eight, eight, 4, 5, 6, 7);
  const Floats4 four = front > back ? front : back;
  const float first = four[0] > four[2] ? four[0] : four[2];
  const float second = four[1] > four[3] ? four[1] : four[3];
  return first > second ? first : second;
}

// What is known of each query after some blocks of keys.
struct Softmax {
  float largest[kPromptQueries];
  Floats16 weights[kPromptQueries];  // sums of the weights, by lane
};

// From scores to weights of a block of keys, of which a query sees the first `visible`. What was summed with respect to
// an earlier largest score is scaled.
ZIPMOE_VECTOR_CODE inline __attribute__((always_inline)) void weigh(const PromptAttentionRun& run, uint64_t query,
                                                                    int64_t visible, const float* scores,
                                                                    Softmax& softmax, uint16_t* weights) {
  const Integers16 lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  Floats16 hidden;
  spread(-__builtin_inff(), hidden);
  Floats16 vectors[kKeyVectors];
  Floats16 largest = hidden;
#pragma GCC unroll 4
  for (uint64_t i = 0; i < kKeyVectors; ++i) {
    __builtin_memcpy(&vectors[i], scores + i * kVectorLanes, sizeof vectors[i]);
    vectors[i] = vectors[i] * run.scale;
    const Integers16 seen = lane + (int32_t)(i * kVectorLanes) < (int32_t)visible;
    vectors[i] = seen ? vectors[i] : hidden;
    largest = vectors[i] > largest ? vectors[i] : largest;
  }
  const float before = softmax.largest[query];
  const float of_block = largest_of_lanes(largest);
  const float now = of_block > before ? of_block : before;
  Floats16 sum = {};
#pragma GCC unroll 4
  for (uint64_t i = 0; i < kKeyVectors; ++i) {
    Floats16 weight = vectors[i] - now;
    exponential_of_negatives(weight);
    Words16 rounded;
    round_to_upper_halves(weight, rounded);
    store_upper_halves(rounded, weights + i * kVectorLanes);
    sum += (Floats16)rounded;
  }
  if (now > before) {
    Floats16 factor;
    spread(before - now, factor);
    exponential_of_negatives(factor);
    softmax.largest[query] = now;
    softmax.weights[query] *= factor;
    float* sums = run.sums + query * run.head_dimension;
    for (uint64_t i = 0; i < run.head_dimension; i += kVectorLanes) {
      Floats16 part;
      __builtin_memcpy(&part, sums + i, sizeof part);
      part *= factor;
      __builtin_memcpy(sums + i, &part, sizeof part);
    }
  }
  softmax.weights[query] += sum;
}

template <typename Tile>
ZIPMOE_VECTOR_CODE inline __attribute__((always_inline)) void multiply_pairs(const PairProducts& products,
                                                                             uint64_t vectors) {
  static_assert(kPromptQueries % Tile::kRows == 0);
  uint64_t vector = 0;
  for (; vector + Tile::kVectors <= vectors; vector += Tile::kVectors) {
    for (uint64_t row = 0; row < kPromptQueries; row += Tile::kRows) Tile::whole(products, row, vector);
  }
  for (; vector < vectors; ++vector) {
    for (uint64_t row = 0; row < kPromptQueries; row += Tile::kRows) Tile::narrow(products, row, vector);
  }
}

template <typename Tile>
ZIPMOE_VECTOR_CODE inline __attribute__((always_inline)) void attend_in_blocks(const PromptAttentionRun& run) {
  const uint64_t size = run.head_dimension;
  Softmax softmax;
  alignas(64) float scores[kPromptQueries * kPromptKeys];
  alignas(64) uint16_t weights[kPromptQueries * kPromptKeys] = {};
  for (uint64_t query = 0; query < kPromptQueries; ++query) {
    softmax.largest[query] = -__builtin_inff();
    softmax.weights[query] = Floats16{};
  }
  for (uint64_t i = 0; i < kPromptQueries * size; ++i) run.sums[i] = 0.0f;

  const uint64_t seen = run.first_position + run.query_count;
  for (uint64_t key = 0; key < seen; key += kPromptKeys) {
    for (uint64_t i = 0; i < kPromptQueries * kPromptKeys; ++i) scores[i] = 0.0f;
    const uint64_t keys = seen - key < kPromptKeys ? seen - key : kPromptKeys;
    const uint64_t vectors = (keys + kPromptKeyVector - 1) / kPromptKeyVector;
    multiply_pairs<Tile>({.left = run.queries,
                          .left_stride = size,
                          .right = run.keys + key * size,
                          .right_pair_stride = 2 * kPromptKeyVector,
                          .right_vector_stride = kPromptKeyVector * size,
                          .pairs = size / 2,
                          .sums = scores,
                          .sums_stride = kPromptKeys},
                         vectors);
    for (uint64_t query = 0; query < run.query_count; ++query) {
      weigh(run, query, (int64_t)(run.first_position + query + 1) - (int64_t)key, scores + query * kPromptKeys, softmax,
            weights + query * kPromptKeys);
    }
    multiply_pairs<Tile>({.left = weights,
                          .left_stride = kPromptKeys,
                          .right = run.values + key * size,
                          .right_pair_stride = 2 * size,
                          .right_vector_stride = 2 * kVectorLanes,
                          .pairs = (keys + 1) / 2,
                          .sums = run.sums,
                          .sums_stride = size},
                         size / kVectorLanes);
  }
  for (uint64_t query = 0; query < run.query_count; ++query) {
    const float sum = sum_of_lanes(softmax.weights[query]);
    for (uint64_t i = 0; i < size; i += kVectorLanes) {
      Floats16 mixed;
      __builtin_memcpy(&mixed, run.sums + query * size + i, sizeof mixed);
      mixed /= sum;
      Words16 rounded;
      round_to_upper_halves(mixed, rounded);
      store_upper_halves(rounded, run.out + query * run.out_stride + i);
    }
  }
}

}  // namespace
}  // namespace zipmoe::simd
