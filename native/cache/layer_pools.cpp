#include "cache/layer_pools.hpp"

#include <algorithm>
#include <stdexcept>
#include <utility>

namespace zipmoe {
namespace {

constexpr double kDefaultToleranceShare = 0.1;

double checked_tolerance(const PoolOptions& options) {
  const double tolerance = options.tolerance.value_or(kDefaultToleranceShare * options.experts);
  if (!(tolerance >= 0)) throw std::invalid_argument("the tolerance must be at least 0 ranks");
  return tolerance;
}

}  // namespace

bool reachable_without_reading(Residency from, Residency to, bool just_executed) {
  if (from == Residency::full && to == Residency::sign_mantissa) return true;  // the bytes are part of the weights
  return contains(from, to) || (just_executed && from != Residency::full);
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
  staging_left_ = options_.staging;
  for (const uint32_t expert : experts) dispatch(expert);
  for (const uint32_t expert : experts) requested_[expert] = false;
  outcome.transitions = std::exchange(transitions_, {});
  return outcome;
}

void LayerPools::correct(uint32_t expert, Residency actual) {
  const Residency booked = residency_.at(expert);
  if (booked == actual) return;
  if (booked != Residency::miss) --occupied_[booked];
  if (actual != Residency::miss) ++occupied_[actual];
  if (booked == Residency::miss) policy_->admitted(expert);
  if (actual == Residency::miss) policy_->removed(expert);
  residency_[expert] = actual;
}

std::vector<Transition> LayerPools::resize(const PoolSlots& slots) {
  options_.slots = slots;
  staging_left_ = std::numeric_limits<uint32_t>::max();  // nothing is being executed
  for (Residency pool = Residency::full; pool != Residency::miss; pool = next_pool(pool)) {
    while (occupied_[pool] > slots[pool]) {
      const auto victim = policy_->victim([&](RecordIndex candidate) { return residency_[candidate] == pool; });
      settle(victim.value(), reachable_destination(*victim, pool, false), false);
    }
  }
  return std::exchange(transitions_, {});
}

Residency LayerPools::destination(uint32_t expert, Residency first) const {
  // Ranks end below the number of experts: with a tolerance of all of them none need be counted.
  const bool limited = tolerance_ < options_.experts;
  const std::optional<uint32_t> rank = limited ? policy_->rank(expert) : std::nullopt;
  double threshold = tolerance_;
  for (Residency pool = Residency::full; pool != Residency::miss; pool = next_pool(pool)) {
    threshold += options_.slots[pool];
    if (pool < first || options_.slots[pool] == 0 || (rank && *rank >= threshold)) continue;
    return pool;
  }
  return Residency::miss;
}

Residency LayerPools::reachable_destination(uint32_t expert, Residency above, bool just_executed) const {
  const Residency from = residency_[expert];
  Residency to = above;
  while (to != Residency::miss) {
    to = destination(expert, next_pool(to));
    const bool staged = from == Residency::full && to == Residency::sign_mantissa;
    if (reachable_without_reading(from, to, just_executed) && (!staged || staging_left_ > 0)) break;
  }
  return to;
}

void LayerPools::dispatch(uint32_t expert) {
  const Residency now = residency_[expert];
  if (now != Residency::miss) policy_->used(expert);
  if (now != Residency::miss && !policy_->values_use()) return;
  const Residency to = destination(expert, Residency::full);
  if (to < now || now == Residency::miss) settle(expert, to, true);
}

void LayerPools::settle(uint32_t expert, Residency to, bool just_executed) {
  const Residency from = residency_[expert];
  if (from == to) return;
  // The old slot is free for those who make room: what was executed has been reconstructed elsewhere.
  if (from != Residency::miss) {
    --occupied_[from];
  } else {
    policy_->admitted(expert);
  }
  while (to != Residency::miss && occupied_[to] >= options_.slots[to]) {
    const Residency below = reachable_destination(expert, to, just_executed);
    const bool competes = !just_executed || below != Residency::miss;
    const struct {
      const LayerPools& pools;
      uint32_t expert;
      bool competes;
      Residency pool;
    } wanted{*this, expert, competes, to};
    // One reference is small enough for the predicate not to allocate.
    const std::optional<RecordIndex> victim = policy_->victim([&wanted](RecordIndex candidate) {
      if (candidate == wanted.expert) return wanted.competes;
      return wanted.pools.residency_[candidate] == wanted.pool && !wanted.pools.requested_[candidate];
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
    ++occupied_[to];
    if (just_executed) policy_->used(expert);
  }
  if (from == Residency::full && to == Residency::sign_mantissa) --staging_left_;
  if (from != to) transitions_.push_back({expert, from, to});
}

}  // namespace zipmoe
