// Parts of decoder layers as Python holds them: what they are made of lives as long as they do.
#pragma once
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstdint>
#include <optional>
#include <span>
#include <stdexcept>
#include <vector>

#include "bindings/engine_arrays.hpp"
#include "runtime/dense_steps.hpp"

namespace zipmoe {

using Vector = nanobind::ndarray<const uint16_t, nanobind::ndim<1>, nanobind::c_contig, nanobind::device::cpu>;
using Angles = nanobind::ndarray<const uint16_t, nanobind::ndim<3>, nanobind::c_contig, nanobind::device::cpu>;
using Entries = nanobind::ndarray<uint16_t, nanobind::ndim<4>, nanobind::c_contig, nanobind::device::cpu>;

// A bias or a norm's weight, which lives as long as this.
struct HeldVector {
  std::optional<Vector> array;

  std::span<const uint16_t> values() const {
    return array ? std::span(array->data(), array->size()) : std::span<const uint16_t>();
  }
};

struct HeldProjection {
  DenseProjection projection;
  HeldVector bias;
};

struct HeldNorm {
  HeldVector weight;
  float epsilon = 0.0f;

  RmsNorm norm(uint64_t size) const {
    if (!weight.array) return {};
    if (weight.values().size() != size) throw std::invalid_argument("a norm has one weight for every value");
    return {weight.values().data(), epsilon};
  }
};

struct HeldAttention {
  std::vector<HeldProjection> projections;  // query, key, value, output
  std::vector<HeldNorm> norms;              // query, key
  AttentionLayer layer;
};

struct HeldNetwork {
  std::vector<HeldProjection> projections;  // gate, up, down
  DenseNetwork network;
};

inline RotaryPositions rotary_positions(const std::optional<Angles>& cosines, const std::optional<Angles>& sines,
                                        uint64_t sequences, uint64_t tokens) {
  if (!cosines && !sines) return {};
  const auto fits = [&](const Angles& angles) {
    return (angles.shape(0) == sequences || angles.shape(0) == 1) && angles.shape(1) == tokens;
  };
  if (!cosines || !sines || !fits(*cosines) || !fits(*sines) || cosines->shape(0) != sines->shape(0) ||
      cosines->shape(2) != sines->shape(2)) {
    throw std::invalid_argument("cosines and sines have the shape [sequences or 1, new tokens, dimensions]");
  }
  const uint64_t dimensions = cosines->shape(2);
  return {cosines->data(), sines->data(), dimensions, cosines->shape(0) == 1 ? 0 : tokens * dimensions};
}

// The buffers of a cache for `rows` new tokens in all, and how many each sequence has.
struct CacheEntries {
  KeyValueCache cache;
  uint64_t sequences;
  uint64_t tokens;

  CacheEntries(const AttentionShape& shape, const Entries& keys, const Entries& values, uint64_t length, uint64_t rows)
      : cache{keys.data(), values.data(), length, keys.shape(2)}, sequences(keys.shape(0)), tokens(0) {
    const auto fits = [&](const Entries& entries) {
      return entries.shape(0) == sequences && entries.shape(1) == shape.key_value_heads &&
             entries.shape(2) == cache.capacity && entries.shape(3) == shape.head_dimension;
    };
    if (sequences == 0 || rows == 0 || rows % sequences != 0 || !fits(keys) || !fits(values)) {
      throw std::invalid_argument(
          "keys and values have the shape [sequences, key-value heads, capacity, head dimension]");
    }
    tokens = rows / sequences;
  }
};

}  // namespace zipmoe
