// Python face of the cache policies and pools, which work without an engine (simulation, planning).
#include <nanobind/nanobind.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "bindings/module.hpp"
#include "cache/eviction_policy.hpp"
#include "cache/layer_pools.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace zipmoe {
namespace {

using TransitionTuple = std::tuple<uint32_t, uint8_t, uint8_t>;

void init_pools(LayerPools* self, uint32_t experts, const std::array<uint32_t, kPools>& slots,
                const std::string& policy, std::optional<double> tolerance, double half_life_steps,
                uint32_t requests_per_step, uint64_t seed, std::optional<uint32_t> staging) {
  new (self) LayerPools({.experts = experts,
                         .slots = {slots},
                         .policy = policy,
                         .parameters = {half_life_steps, requests_per_step, seed},
                         .tolerance = tolerance,
                         .staging = staging.value_or(PoolOptions{}.staging)});
}

std::vector<TransitionTuple> tuples(const std::vector<Transition>& moves) {
  std::vector<TransitionTuple> result;
  for (const Transition& move : moves) {
    result.emplace_back(move.expert, static_cast<uint8_t>(move.from), static_cast<uint8_t>(move.to));
  }
  return result;
}

std::tuple<std::vector<uint8_t>, std::vector<TransitionTuple>> access(LayerPools& self,
                                                                      const std::vector<uint32_t>& experts) {
  const AccessOutcome outcome = self.access(experts);
  std::vector<uint8_t> before;
  for (const Residency residency : outcome.before) before.push_back(static_cast<uint8_t>(residency));
  return {before, tuples(outcome.transitions)};
}

std::vector<uint8_t> residencies(const LayerPools& self) {
  std::vector<uint8_t> result;
  for (uint32_t expert = 0; expert < self.options().experts; ++expert) {
    result.push_back(static_cast<uint8_t>(self.residency(expert)));
  }
  return result;
}

}  // namespace

void bind_cache(nb::module_& module) {
  module.def(
      "cache_policies",
      [] {
        std::vector<std::string> names;
        for (const std::string_view name : eviction_policy_names()) names.emplace_back(name);
        return names;
      },
      "Names of the eviction policies.");

  nb::class_<LayerPools>(module, "LayerPools",
                         "The pools F, C, S, E over one set of experts, with a policy. Residency codes: 0 F, 1 C, 2 S, "
                         "3 E, 4 miss.")
      .def(
          "__init__", &init_pools, "experts"_a, "slots"_a, "policy"_a = "zipmoe", nb::kw_only(),
          "tolerance"_a = nb::none(), "half_life_steps"_a = PolicyParameters{}.half_life_steps,
          "requests_per_step"_a = PolicyParameters{}.requests_per_step, "seed"_a = PolicyParameters{}.seed,
          "staging"_a = nb::none(),
          "slots: of F, C, S, E. tolerance: in ranks; None: 10 % of the experts. requests_per_step: accesses that make "
          "one step of the model. staging: experts that may go from F to S in one request; None: any number. "
          "ValueError if something is out of range.")
      .def("access", &access, "experts"_a,
           "One execution of a sparse layer with these distinct experts: (residency of each before, moves (expert, "
           "from, to) that were made afterwards).")
      .def(
          "resize",
          [](LayerPools& self, const std::array<uint32_t, kPools>& slots) { return tuples(self.resize({slots})); },
          "slots"_a, "Other numbers of slots of F, C, S, E: the moves (expert, from, to) that make room.")
      .def_prop_ro("residencies", &residencies, "Of every expert, by number.")
      .def_prop_ro("tolerance", &LayerPools::tolerance);
}

}  // namespace zipmoe
