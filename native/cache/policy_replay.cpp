#include "cache/policy_replay.hpp"

#include <algorithm>
#include <cstdio>
#include <stdexcept>
#include <utility>

namespace zipmoe {
namespace {

// Whether anybody ever has to make room for others.
bool contested(const PoolSlots& slots, uint32_t users) {
  const Residency first = slots[Residency::full] > 0 ? Residency::full : Residency::both_chunks;
  return slots[first] < users;
}

}  // namespace

std::string PolicyCandidate::description() const {
  if (policy != "zipmoe") return policy;
  std::array<char, 32> number{};
  std::snprintf(number.data(), number.size(), "%g", half_life_steps);
  return policy + " with a half-life of " + number.data() + " steps";
}

std::vector<PolicyCandidate> default_candidates() {
  // `lfu` is as good as a half-life of 128 steps; `fifo` and `marking` were never the best (docs/pools.md).
  return {{"zipmoe", 16}, {"zipmoe", 4}, {"zipmoe", 32}, {"zipmoe", 128}, {"lru"}, {"lfuda"}};
}

PolicyReplay::PolicyReplay(std::vector<ReplayedPool> pools, ReplayOptions options)
    : options_(std::move(options)),
      choice_(static_cast<uint32_t>(options_.candidates.size()), 0, options_.choice),
      step_costs_(options_.candidates.size()) {
  if (pools.empty()) throw std::invalid_argument("there are no pools to replay");
  if (options_.requests_per_step == 0) throw std::invalid_argument("a step has at least one request");
  for (const PolicyCandidate& candidate : options_.candidates) {
    std::vector<LayerPools>& ghosts = ghosts_.emplace_back();
    ghosts.reserve(pools.size());
    for (const ReplayedPool& pool : pools) {
      PoolOptions own = pool.options;
      own.policy = candidate.policy;
      own.parameters.half_life_steps = candidate.half_life_steps;
      ghosts.emplace_back(own);
    }
  }
  for (const ReplayedPool& pool : pools) {
    costs_.push_back(pool.costs);
    users_.push_back(std::min(pool.users, pool.options.experts));
    contested_.push_back(contested(pool.options.slots, users_.back()));
    last_use_.emplace_back(pool.options.experts);
  }
}

void PolicyReplay::request(uint32_t pool, std::span<const uint32_t> experts, bool comparable) {
  const ResidencyCosts& costs = costs_.at(pool);
  for (size_t candidate = 0; candidate < ghosts_.size(); ++candidate) {
    const AccessOutcome outcome = ghosts_[candidate][pool].access(experts);
    if (!contested_[pool]) continue;
    for (const Residency found : outcome.before) step_costs_[candidate] += costs[static_cast<size_t>(found)];
  }
  if (contested_[pool]) {
    step_contested_ = true;
    step_comparable_ = step_comparable_ && comparable;
  }
  for (const uint32_t expert : experts) last_use_[pool][expert] = ++uses_;
  if (++step_requests_ == options_.requests_per_step) end_step();
}

void PolicyReplay::end_step() {
  // Steps without evidence do not push those that are some out of the window, nor count among the least.
  if (step_contested_ && step_comparable_) changed_ = choice_.step(step_costs_) || changed_;
  std::fill(step_costs_.begin(), step_costs_.end(), 0.0);
  step_requests_ = 0;
  step_contested_ = false;
  step_comparable_ = true;
}

void PolicyReplay::resize(uint32_t pool, const PoolSlots& slots) {
  for (std::vector<LayerPools>& ghosts : ghosts_) ghosts.at(pool).resize(slots);
  contested_.at(pool) = contested(slots, users_[pool]);
}

bool PolicyReplay::take_change() { return std::exchange(changed_, false); }

std::unique_ptr<EvictionPolicy> PolicyReplay::policy(uint32_t pool, const std::vector<bool>& resident) const {
  const std::vector<uint64_t>& last_use = last_use_.at(pool);
  if (resident.size() != last_use.size()) throw std::invalid_argument("the replayed pool has other experts");
  std::vector<RecordIndex> residents;
  for (RecordIndex expert = 0; expert < resident.size(); ++expert) {
    if (resident[expert]) residents.push_back(expert);
  }
  std::sort(residents.begin(), residents.end(),
            [&](RecordIndex a, RecordIndex b) { return last_use[a] < last_use[b]; });
  return ghosts_[choice_.chosen()][pool].policy().holding(residents);
}

}  // namespace zipmoe
