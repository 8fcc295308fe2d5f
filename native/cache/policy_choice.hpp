// Which of several cache policies is the best now, by what each would have cost in the last steps.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace zipmoe {

// The defaults are what came closest to the best fixed policy in replays (docs/pools.md).
struct ChoiceOptions {
  uint32_t window_steps = 96;  // older steps are forgotten, so that the choice follows the workload
  uint32_t least_steps = 8;    // nothing is chosen from fewer steps
  // Another candidate takes over when it costs less than the chosen one by this share of the latter's cost ...
  double margin = 0.01;
  // ... and by this many standard errors of the mean difference per step. Where steps differ more than the candidates
  // do, more of them are waited for.
  double standard_errors = 1;
};

// Costs are compared step by step, so what makes a step dear for all candidates alike is no evidence. Equal candidates
// never take turns. Deterministic. Not thread-safe.
class PolicyChoice {
 public:
  // `first` rules until there is evidence against it. Throws std::invalid_argument.
  PolicyChoice(uint32_t candidates, uint32_t first, const ChoiceOptions& options = {});

  // What one step would have cost with each candidate, in any unit, not negative. Returns whether the choice changed.
  bool step(std::span<const double> costs);

  uint32_t chosen() const { return chosen_; }
  uint64_t changes() const { return changes_; }
  // Mean cost of a step with a candidate, over the window; 0 before the first step.
  double mean_cost(uint32_t candidate) const;

 private:
  bool better(uint32_t candidate) const;

  const ChoiceOptions options_;
  const uint32_t candidates_;
  std::vector<double> costs_;  // [window][candidates], a ring of steps
  std::vector<double> sums_;   // over the ring, by candidate
  uint32_t kept_steps_ = 0;
  uint32_t next_ = 0;  // the ring's oldest step, once it is full
  uint32_t chosen_;
  uint64_t changes_ = 0;
};

}  // namespace zipmoe
