// The kernels of attention_kernels.hpp, written once in vectors of 16 values, which the compiler lays out for the
// instruction set of the translation unit that includes this. ZIPMOE_VECTOR_CODE marks the functions
// (wide_code.hpp).
#pragma once
#include "simd/attention_kernels.hpp"
#include "simd/lane_vectors.hpp"

namespace zipmoe::simd {
namespace {

static_assert(kVectorLanes == kAttentionLanes);

// `count` is a constant of each caller.
ZIPMOE_VECTOR_CODE inline __attribute__((always_inline)) void score_positions(const AttentionScoresRun& run,
                                                                              uint64_t first, const uint64_t count) {
  constexpr uint64_t positions_max = 4;
  Floats16 lanes[positions_max] = {};
  for (uint64_t dimension = 0; dimension < run.head_dimension; dimension += kAttentionLanes) {
    Floats16 query;
    __builtin_memcpy(&query, run.query + dimension, sizeof query);
#pragma GCC unroll 4
    for (uint64_t i = 0; i < count; ++i) {
      Floats16 key;
      widen(run.keys + (first + i) * run.head_dimension + dimension, key);
      lanes[i] += query * key;
    }
  }
#pragma GCC unroll 4
  for (uint64_t i = 0; i < count; ++i) run.scores[first + i] = sum_of_lanes(lanes[i]) * run.scale;
}

ZIPMOE_VECTOR_CODE inline __attribute__((always_inline)) void score(const AttentionScoresRun& run) {
  uint64_t position = 0;
  for (; position + 4 <= run.positions; position += 4) score_positions(run, position, 4);
  for (; position < run.positions; ++position) score_positions(run, position, 1);
}

// `count` vectors of dimensions from `begin` on; a constant of each caller.
ZIPMOE_VECTOR_CODE inline __attribute__((always_inline)) void mix_dimensions(const AttentionMixRun& run, uint64_t begin,
                                                                             const uint64_t count) {
  constexpr uint64_t vectors_max = 4;
  Floats16 sums[vectors_max] = {};
  for (uint64_t position = 0; position < run.positions; ++position) {
    const uint16_t* values = run.values + position * run.head_dimension + begin;
    const float weight = run.weights[position];
#pragma GCC unroll 4
    for (uint64_t i = 0; i < count; ++i) {
      Floats16 value;
      widen(values + i * kAttentionLanes, value);
      sums[i] += value * weight;
    }
  }
#pragma GCC unroll 4
  for (uint64_t i = 0; i < count; ++i)
    __builtin_memcpy(run.out + begin + i * kAttentionLanes, &sums[i], sizeof sums[i]);
}

ZIPMOE_VECTOR_CODE inline __attribute__((always_inline)) void mix(const AttentionMixRun& run) {
  uint64_t dimension = 0;
  for (; dimension + 4 * kAttentionLanes <= run.head_dimension; dimension += 4 * kAttentionLanes) {
    mix_dimensions(run, dimension, 4);
  }
  for (; dimension < run.head_dimension; dimension += kAttentionLanes) mix_dimensions(run, dimension, 1);
}

}  // namespace
}  // namespace zipmoe::simd
