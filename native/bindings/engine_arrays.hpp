// Arrays that Python hands to the engine: BF16 patterns, and where the rows of routed tokens belong.
#pragma once
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>

#include <cstdint>
#include <optional>

#include "runtime/engine.hpp"

namespace zipmoe {

using Words2 = nanobind::ndarray<const uint16_t, nanobind::ndim<2>, nanobind::c_contig, nanobind::device::cpu>;
using OutWords2 = nanobind::ndarray<uint16_t, nanobind::ndim<2>, nanobind::c_contig, nanobind::device::cpu>;
using BiasWords =
    std::optional<nanobind::ndarray<const uint16_t, nanobind::ndim<1>, nanobind::c_contig, nanobind::device::cpu>>;

using Positions = nanobind::ndarray<const int64_t, nanobind::ndim<1>, nanobind::c_contig, nanobind::device::cpu>;
using RoutingWeights = nanobind::ndarray<const float, nanobind::ndim<2>, nanobind::c_contig, nanobind::device::cpu>;

inline BFloat16Rows rows_of(const Words2& x) { return {{x.data(), x.size()}, x.shape(0)}; }

}  // namespace zipmoe
