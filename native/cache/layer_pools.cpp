#include "cache/layer_pools.hpp"

#include <algorithm>
#include <stdexcept>
#include <utility>

namespace zipmoe {
namespace {

constexpr double kDefaultToleranceShare = 0.1;

constexpr size_t index(Residency residency) { return static_cast<size_t>(residency); }

double checked_tolerance(const PoolOptions& options) {
  const double tolerance = options.tolerance.value_or(kDefaultToleranceShare * options.experts);
  if (!(tolerance >= 0)) throw std::invalid_argument("the tolerance must be at least 0 ranks");
  return tolerance;
}

}  // namespace

bool reachable_without_reading(Residency from, Residency to, bool just_executed) {
  if (from == to || to == Residency::miss) return true;
  if (from == Residency::full) return to == Residency::sign_mantissa;  // the exponents it has are not compressed
  if (just_executed) return true;
  return from == Residency::both_chunks && to != Residency::full;
}

LayerPools::LayerPools(const PoolOptions& options)
    : options_(options),
      tolerance_(checked_tolerance(options)),
      policy_(make_eviction_policy(options.policy, options.experts, options.parameters)),
      residency_(options.experts, Residency::miss),
      requested_(options.experts, false) {
  if (options.experts == 0) throw std::invalid_argument("pools need at least one expert");
}

AccessOutcome LayerPools::access(std::span<const uint32_t> experts) {
  AccessOutcome outcome;
  bool repeated = false;
  for (const uint32_t expert : experts) {
    if (expert >= options_.experts) break;
    repeated = repeated || requested_[expert];
    requested_[expert] = true;
    outcome.before.push_back(residency_[expert]);
  }
  if (repeated || outcome.before.size() < experts.size()) {
    std::fill(requested_.begin(), requested_.end(), false);
    if (repeated) throw std::invalid_argument("a request names each expert once");
    throw std::out_of_range("a request names an expert that does not exist");
  }
  policy_->requested(experts);
  for (const uint32_t expert : experts) dispatch(expert);
  for (const uint32_t expert : experts) requested_[expert] = false;
  outcome.transitions = std::exchange(transitions_, {});
  return outcome;
}

Residency LayerPools::destination(uint32_t expert, uint32_t first) const {
  const std::optional<uint32_t> rank = policy_->rank(expert);
  uint64_t slots_so_far = 0;
  for (uint32_t pool = 0; pool < kPoolCount; ++pool) {
    slots_so_far += options_.slots[pool];
    if (pool < first || options_.slots[pool] == 0) continue;
    if (rank && *rank >= static_cast<double>(slots_so_far) + tolerance_) continue;
    return static_cast<Residency>(pool);
  }
  return Residency::miss;
}

Residency LayerPools::reachable_destination(uint32_t expert, Residency above, bool just_executed) const {
  Residency to = above;
  do {
    to = destination(expert, static_cast<uint32_t>(index(to)) + 1);
  } while (!reachable_without_reading(residency_[expert], to, just_executed));
  return to;
}

void LayerPools::dispatch(uint32_t expert) {
  const Residency now = residency_[expert];
  if (now != Residency::miss) policy_->used(expert);
  if (now != Residency::miss && !policy_->values_use()) return;
  const Residency to = destination(expert, 0);
  // From F there is no way back to compressed chunks: it stays until its slot is needed.
  if (now == Residency::full && !reachable_without_reading(now, to, true)) return;
  settle(expert, to, true);
}

void LayerPools::settle(uint32_t expert, Residency to, bool just_executed) {
  const Residency from = residency_[expert];
  if (from == to) return;
  // The old slot is free for those who make room: what was executed has been reconstructed elsewhere.
  if (from != Residency::miss) {
    --occupied_[index(from)];
  } else {
    policy_->admitted(expert);
  }
  while (to != Residency::miss && occupied_[index(to)] == options_.slots[index(to)]) {
    const Residency below = reachable_destination(expert, to, just_executed);
    const bool competes = !just_executed || below != Residency::miss;
    const std::optional<RecordIndex> victim = policy_->victim([&](RecordIndex candidate) {
      if (candidate == expert) return competes;
      return residency_[candidate] == to && !requested_[candidate];
    });
    if (victim && *victim != expert) {
      settle(*victim, reachable_destination(*victim, to, false), false);
    } else {
      to = below;
    }
  }
  residency_[expert] = to;
  if (to == Residency::miss) {
    policy_->removed(expert);
  } else {
    ++occupied_[index(to)];
    if (just_executed) policy_->used(expert);
  }
  if (from != to) transitions_.push_back({expert, from, to});
}

}  // namespace zipmoe
