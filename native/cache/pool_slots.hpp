// How many experts each of the four pools may hold.
#pragma once

#include <array>
#include <cstdint>

#include "schedule/residency.hpp"

namespace zipmoe {

inline constexpr uint32_t kPools = 4;  // F, C, S, E: the residencies but the miss

// Experts per pool of one group, in the order of Residency.
struct PoolSlots {
  std::array<uint32_t, kPools> experts{};

  uint32_t operator[](Residency pool) const { return experts.at(static_cast<size_t>(pool)); }
  uint32_t& operator[](Residency pool) { return experts.at(static_cast<size_t>(pool)); }
  friend bool operator==(const PoolSlots&, const PoolSlots&) = default;
};

// The pool that the next less complete residency belongs to; `miss` after the last one.
constexpr Residency next_pool(Residency pool) { return static_cast<Residency>(static_cast<uint8_t>(pool) + 1); }

// Whether an expert in memory as `from` becomes one as `to` by dropping parts alone, without reading or decoding.
constexpr bool contains(Residency from, Residency to) {
  if (from == to || to == Residency::miss) return true;
  return from == Residency::both_chunks && to != Residency::full;
}

}  // namespace zipmoe
