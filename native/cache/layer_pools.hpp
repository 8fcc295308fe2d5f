// The paper's four pools (F, C, S, E) over one set of experts: who is where, where an expert goes after its execution,
// and who makes room. Decides and keeps the books, for the engine and for the simulator alike; whoever owns the memory
// carries the moves out.
#pragma once

#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "cache/eviction_policy.hpp"
#include "cache/pool_slots.hpp"

namespace zipmoe {

// Whether the parts that `to` holds are all among those in memory, so that nothing need be read. An expert that was
// just executed has been reconstructed, so all its parts are there; only of one that lay in F the compressed chunks are
// not.
bool reachable_without_reading(Residency from, Residency to, bool just_executed);

struct PoolOptions {
  uint32_t experts = 0;
  PoolSlots slots;
  std::string policy = "zipmoe";
  PolicyParameters parameters;
  // delta: an expert may enter a pool from this many ranks below the pool's last slot; default: 10 % of the experts.
  std::optional<double> tolerance;
  // How many experts may go from F to S in one request: somebody who is yet to be executed may still lie in the slot.
  uint32_t staging = std::numeric_limits<uint32_t>::max();
};

struct Transition {
  uint32_t expert;
  Residency from;
  Residency to;
  friend bool operator==(const Transition&, const Transition&) = default;
};

struct AccessOutcome {
  std::vector<Residency> before;  // of each requested expert, in the order of the request
  // Moves, each expert's slot in the new pool having become free by those before. A requested expert moves when it has
  // been executed, the others at once; its old slot counts as free from the moves before its own on.
  std::vector<Transition> transitions;
};

// The set of experts may be one sparse layer's, or all of a model (numbered through) for one global pool. Decisions
// depend on the sequence of requests only, never on the order in which reads complete. Not thread-safe.
//
// With `zipmoe` an expert of rank r goes to the first pool i with r < tau_i = (slots of the pools up to i) + delta, and
// leaves memory if there is none. With the other policies it goes to the first pool that has slots. No requested expert
// moves to a worse pool than it is in. A full pool gives up its first expert in the policy's order that is not part of
// the request; that one moves on to the next pool for which it qualifies and whose parts it has, or out. The newcomer
// itself competes as long as there is a pool below for it: else every expert within the tolerance of F would drive one
// out of F that is worth more. docs/pools.md says what was measured for these choices.
class LayerPools {
 public:
  // Throws std::invalid_argument.
  explicit LayerPools(const PoolOptions& options);

  // One execution of a sparse layer: returns where its experts were, and moves them afterwards. `experts` must be
  // distinct; throws std::invalid_argument otherwise, std::out_of_range for an unknown one (nothing has changed then).
  AccessOutcome access(std::span<const uint32_t> experts);

  // What was decided could not be done (a read failed, a request was left early): this is how it is.
  void correct(uint32_t expert, Residency actual);
  // Other numbers of slots, between requests: the moves that make room.
  std::vector<Transition> resize(const PoolSlots& slots);

  // From now on this policy decides. It must hold exactly the experts that are in memory (EvictionPolicy::holding):
  // nothing moves.
  void adopt(std::unique_ptr<EvictionPolicy> policy) { policy_ = std::move(policy); }
  const EvictionPolicy& policy() const { return *policy_; }

  Residency residency(uint32_t expert) const { return residency_.at(expert); }
  const PoolOptions& options() const { return options_; }
  uint32_t occupied(Residency pool) const { return occupied_[pool]; }
  double tolerance() const { return tolerance_; }

 private:
  // First pool from `first` on for which the expert qualifies; `miss` if there is none.
  Residency destination(uint32_t expert, Residency first) const;
  // The next one below `above` whose parts the expert has.
  Residency reachable_destination(uint32_t expert, Residency above, bool just_executed) const;
  void dispatch(uint32_t expert);
  void settle(uint32_t expert, Residency to, bool just_executed);

  PoolOptions options_;
  const double tolerance_;
  std::unique_ptr<EvictionPolicy> policy_;
  std::vector<Residency> residency_;  // by expert
  std::vector<bool> requested_;       // by expert: part of the request that is being served
  PoolSlots occupied_;
  uint32_t staging_left_ = 0;  // of the request that is being served
  std::vector<Transition> transitions_;
};

}  // namespace zipmoe
