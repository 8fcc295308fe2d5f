// The pools of all layers of a model under the policy that a replay of their requests chooses: dispatch and choice in
// one, for the simulator. The engine does the same with its own pools (runtime/engine_policy.cpp).
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "cache/layer_pools.hpp"
#include "cache/policy_replay.hpp"

namespace zipmoe {

class ReplayedPools {
 public:
  // Throws std::invalid_argument.
  ReplayedPools(const std::vector<ReplayedPool>& pools, ReplayOptions options);
  ReplayedPools(const ReplayedPools&) = delete;
  ReplayedPools& operator=(const ReplayedPools&) = delete;

  AccessOutcome access(uint32_t pool, std::span<const uint32_t> experts);
  std::vector<Transition> resize(uint32_t pool, const PoolSlots& slots);
  const LayerPools& pools(uint32_t pool) const { return pools_.at(pool); }
  const PolicyReplay& replay() const { return replay_; }

 private:
  PolicyReplay replay_;
  std::vector<LayerPools> pools_;
};

// Which experts are in memory, in whatever pool.
std::vector<bool> residents(const LayerPools& pools);

}  // namespace zipmoe
