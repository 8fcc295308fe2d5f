// The canonical order of long fp32 sums outside of products (docs/compute.md): eight lanes, then lane i takes lane i +
// 4, i + 2, i + 1. For translation units that keep products and sums apart (-ffp-contract=off, CMakeLists.txt).
#pragma once
#include <cstdint>

namespace zipmoe {

// The sum of term(0) .. term(count - 1).
template <typename Term>
float sum_in_lanes(uint64_t count, const Term& term) {
  constexpr uint64_t lane_count = 8;  // the compiler makes vectors of them
  float lanes[lane_count] = {};
  uint64_t i = 0;
  for (; i + lane_count <= count; i += lane_count) {
    for (uint64_t lane = 0; lane < lane_count; ++lane) lanes[lane] += term(i + lane);
  }
  for (uint64_t lane = 0; i < count; ++i, ++lane) lanes[lane] += term(i);
  for (uint64_t half = lane_count / 2; half > 0; half /= 2) {
    for (uint64_t lane = 0; lane < half; ++lane) lanes[lane] += lanes[lane + half];
  }
  return lanes[0];
}

}  // namespace zipmoe
