#include "cache/replayed_pools.hpp"

#include <utility>

namespace zipmoe {

std::vector<bool> residents(const LayerPools& pools) {
  std::vector<bool> result(pools.options().experts);
  for (uint32_t expert = 0; expert < result.size(); ++expert) {
    result[expert] = pools.residency(expert) != Residency::miss;
  }
  return result;
}

ReplayedPools::ReplayedPools(const std::vector<ReplayedPool>& pools, ReplayOptions options)
    : replay_(pools, std::move(options)) {
  for (const ReplayedPool& pool : pools) {
    PoolOptions own = pool.options;
    own.policy = replay_.chosen().policy;
    own.parameters.half_life_steps = replay_.chosen().half_life_steps;
    pools_.emplace_back(own);
  }
}

AccessOutcome ReplayedPools::access(uint32_t pool, std::span<const uint32_t> experts) {
  if (replay_.take_change()) {
    for (uint32_t i = 0; i < pools_.size(); ++i) pools_[i].adopt(replay_.policy(i, residents(pools_[i])));
  }
  replay_.request(pool, experts);
  return pools_.at(pool).access(experts);
}

std::vector<Transition> ReplayedPools::resize(uint32_t pool, const PoolSlots& slots) {
  replay_.resize(pool, slots);
  return pools_.at(pool).resize(slots);
}

}  // namespace zipmoe
