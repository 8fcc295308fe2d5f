// Ghost caches: every candidate policy serves the same requests in pools of its own that hold no data, and the one that
// would have had to read and decode least rules the real pools.
#pragma once

#include <array>
#include <cstdint>
#include <limits>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "cache/layer_pools.hpp"
#include "cache/policy_choice.hpp"

namespace zipmoe {

struct PolicyCandidate {
  std::string policy;
  double half_life_steps = PolicyParameters{}.half_life_steps;  // of `zipmoe`

  std::string description() const;  // "lru", "zipmoe with a half-life of 16 steps"
  friend bool operator==(const PolicyCandidate&, const PolicyCandidate&) = default;
};

// What is replayed unless somebody says otherwise; the first of them rules at first.
std::vector<PolicyCandidate> default_candidates();

// What an expert costs that is found in each residency, in any unit that is the same for all pools.
using ResidencyCosts = std::array<double, kPools + 1>;

struct ReplayedPool {
  PoolOptions options;  // of the real pools; the policy and its half-life are the candidates'
  ResidencyCosts costs{};
  // How many of the experts will ever be asked for: while the first pool that has slots holds them all, policies do not
  // differ and costs are not compared. The ghosts hear of the requests all the same: the pool may shrink.
  uint32_t users = std::numeric_limits<uint32_t>::max();
};

struct ReplayOptions {
  std::vector<PolicyCandidate> candidates = default_candidates();
  uint32_t requests_per_step = 1;  // of all pools together: sparse layers of the model
  ChoiceOptions choice;
};

// One choice for all pools: a layer alone sees too few experts to tell candidates apart. The real pools are the
// caller's: before each request that it gives to them, it asks for what has been decided since, and adopts it. It tells
// about every request before the next one. Not thread-safe.
class PolicyReplay {
 public:
  // Throws std::invalid_argument.
  PolicyReplay(std::vector<ReplayedPool> pools, ReplayOptions options);

  // A request of `pool` (by number) for these distinct experts. `comparable`: whether in the real pools the policy
  // alone said who made room; else what the ghosts would have read is not what the real pools would have, and the whole
  // step is no evidence.
  void request(uint32_t pool, std::span<const uint32_t> experts, bool comparable = true);
  void resize(uint32_t pool, const PoolSlots& slots);
  void set_costs(uint32_t pool, const ResidencyCosts& costs) { costs_.at(pool) = costs; }

  // Whether another candidate rules since take_change() was last called: then the real pools are to adopt policy().
  bool take_change();
  // The chosen policy for one of the real pools, with its memory of all requests so far. `resident`: by expert.
  std::unique_ptr<EvictionPolicy> policy(uint32_t pool, const std::vector<bool>& resident) const;

  const PolicyCandidate& chosen() const { return options_.candidates[choice_.chosen()]; }
  const std::vector<PolicyCandidate>& candidates() const { return options_.candidates; }
  uint64_t changes() const { return choice_.changes(); }
  double mean_cost(uint32_t candidate) const { return choice_.mean_cost(candidate); }
  // The pools of a candidate as they would be.
  const LayerPools& ghost(uint32_t candidate, uint32_t pool) const { return ghosts_.at(candidate).at(pool); }

 private:
  void end_step();

  ReplayOptions options_;
  std::vector<std::vector<LayerPools>> ghosts_;  // by candidate and pool
  std::vector<ResidencyCosts> costs_;            // by pool
  std::vector<uint32_t> users_;                  // by pool
  std::vector<bool> contested_;                  // by pool: somebody has to make room
  std::vector<std::vector<uint64_t>> last_use_;  // by pool and expert; 0: never
  PolicyChoice choice_;
  std::vector<double> step_costs_;  // by candidate, of the step that is under way
  uint32_t step_requests_ = 0;
  bool step_contested_ = false;  // in any of its pools
  bool step_comparable_ = true;
  uint64_t uses_ = 0;
  bool changed_ = false;
};

}  // namespace zipmoe
