// Candidates of a policy replay as Python names them.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "cache/policy_replay.hpp"

namespace zipmoe {

// (policy, half-life in steps)
using CandidatePairs = std::vector<std::pair<std::string, double>>;

inline std::vector<PolicyCandidate> policy_candidates(const CandidatePairs& pairs) {
  std::vector<PolicyCandidate> candidates;
  for (const auto& [policy, half_life_steps] : pairs) candidates.push_back({policy, half_life_steps});
  return candidates;
}

}  // namespace zipmoe
