// Python face of the cache policies and pools, which work without an engine (simulation, planning).
#include <nanobind/nanobind.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings/module.hpp"
#include "bindings/policy_candidates.hpp"
#include "cache/eviction_policy.hpp"
#include "cache/replayed_pools.hpp"

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

using ReplayedPoolTuple = std::tuple<uint32_t, std::array<uint32_t, kPools>, std::array<double, kPools + 1>>;

void init_replayed_pools(ReplayedPools* self, const std::vector<ReplayedPoolTuple>& pools,
                         const CandidatePairs& candidates, uint32_t requests_per_step, std::optional<double> tolerance,
                         uint64_t seed, uint32_t window_steps, uint32_t least_steps, double margin,
                         double standard_errors) {
  std::vector<ReplayedPool> replayed;
  for (const auto& [experts, slots, costs] : pools) {
    // Every pool is asked equally often in a step.
    const uint32_t own_requests = std::max(1U, requests_per_step / static_cast<uint32_t>(pools.size()));
    PoolOptions options;
    options.experts = experts;
    options.slots = {slots};
    options.tolerance = tolerance;
    options.parameters.requests_per_step = own_requests;
    options.parameters.seed = seed + replayed.size();
    replayed.push_back({options, costs});
  }
  ReplayOptions options;
  options.candidates = policy_candidates(candidates);
  options.requests_per_step = requests_per_step;
  options.choice = {window_steps, least_steps, margin, standard_errors};
  new (self) ReplayedPools(replayed, std::move(options));
}

std::tuple<std::vector<uint8_t>, std::vector<TransitionTuple>> replayed_access(ReplayedPools& self, uint32_t pool,
                                                                               const std::vector<uint32_t>& experts) {
  const AccessOutcome outcome = self.access(pool, experts);
  std::vector<uint8_t> before;
  for (const Residency residency : outcome.before) before.push_back(static_cast<uint8_t>(residency));
  return {before, tuples(outcome.transitions)};
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

  module.def(
      "default_candidates",
      [] {
        CandidatePairs pairs;
        for (const PolicyCandidate& candidate : default_candidates()) {
          pairs.emplace_back(candidate.policy, candidate.half_life_steps);
        }
        return pairs;
      },
      "Policies with their half-lives that are replayed unless others are named; the first rules at first.");

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

  const ChoiceOptions choice;
  nb::class_<ReplayedPools>(module, "ReplayedPools",
                            "Pools of all layers under the policy that ghost caches find best while they are used.")
      .def("__init__", &init_replayed_pools, "pools"_a, nb::kw_only(), "candidates"_a, "requests_per_step"_a,
           "tolerance"_a = nb::none(), "seed"_a = uint64_t{0}, "window_steps"_a = choice.window_steps,
           "least_steps"_a = choice.least_steps, "margin"_a = choice.margin,
           "standard_errors"_a = choice.standard_errors,
           "pools: (experts, slots of F, C, S, E, cost of an expert found in F, C, S, E or not at all), one of each "
           "layer, or one for all. candidates: (policy, half-life). requests_per_step: of all pools together. The "
           "others: when another candidate takes over (ChoiceOptions). ValueError if something is out of range.")
      .def("access", &replayed_access, "pool"_a, "experts"_a,
           "One execution of a sparse layer: see LayerPools.access. The policy may have changed before it.")
      .def(
          "residencies", [](const ReplayedPools& self, uint32_t pool) { return residencies(self.pools(pool)); },
          "pool"_a, "Of every expert, by number.")
      .def_prop_ro(
          "policy", [](const ReplayedPools& self) { return self.replay().chosen().description(); },
          "The one that the replay has found best, in words.")
      .def_prop_ro("policy_changes", [](const ReplayedPools& self) { return self.replay().changes(); })
      .def_prop_ro(
          "mean_costs",
          [](const ReplayedPools& self) {
            std::vector<double> costs;
            for (uint32_t i = 0; i < self.replay().candidates().size(); ++i) {
              costs.push_back(self.replay().mean_cost(i));
            }
            return costs;
          },
          "Of a step with each candidate, over the window.");
}

}  // namespace zipmoe
