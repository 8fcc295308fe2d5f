// Who belongs into which pool: the decisions and their books for the experts of one group, without any memory.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "cache/pool_slots.hpp"

namespace zipmoe {

struct PoolMove {
  uint32_t expert;
  Residency to;
  friend bool operator==(const PoolMove&, const PoolMove&) = default;
};

// Decisions depend on the sequence of requests only, never on the order in which reads complete. Not thread-safe.
class PoolDispatch {
 public:
  virtual ~PoolDispatch() = default;

  // One request for distinct experts: what becomes of everybody whose residency changes. A requested expert moves when
  // it has been executed (all its parts are in memory then, unless it was in F); the others at once, and only to
  // residencies whose parts they have. Afterwards no pool holds more than its slots.
  virtual std::vector<PoolMove> request(std::span<const uint32_t> experts) = 0;
  // What was decided could not be done (a read failed, a request was left early): this is how it is.
  virtual void correct(uint32_t expert, Residency actual) = 0;
  // Other numbers of slots, between requests; returns who moves.
  virtual std::vector<PoolMove> resize(const PoolSlots& slots) = 0;

  virtual Residency residency(uint32_t expert) const = 0;
};

struct RankDispatchOptions {
  uint32_t experts = 0;
  PoolSlots slots;
  double tolerance = 0;            // delta, in ranks
  double half_life_requests = 16;  // an activation counts half after this many requests of the group
};

// The paper's dispatch (section 3.4): an expert with rank r (number of experts with a larger decayed activation count)
// goes to the first pool i with r < tau_i = slots of the pools up to i + delta, and out of memory if there is none.
// A full pool gives up the expert with the smallest count (the least recently used one among equals), which moves on to
// the next pool whose parts it has and for which it qualifies. An expert is not moved to a worse pool while nobody
// needs its slot.
class RankDispatch final : public PoolDispatch {
 public:
  // Throws std::invalid_argument.
  explicit RankDispatch(const RankDispatchOptions& options);

  std::vector<PoolMove> request(std::span<const uint32_t> experts) override;
  void correct(uint32_t expert, Residency actual) override;
  std::vector<PoolMove> resize(const PoolSlots& slots) override;
  Residency residency(uint32_t expert) const override { return entries_.at(expert).residency; }

 private:
  struct Entry {
    Residency residency = Residency::miss;
    bool requested = false;  // by the request that is being decided
    double count = 0;        // in units of `activation_`
    uint64_t last_request = 0;
  };

  bool has_slots(Residency pool) const { return slots_[pool] > 0; }
  uint32_t rank(uint32_t expert) const;
  Residency target(uint32_t expert) const;
  bool worth_less(uint32_t a, uint32_t b) const;
  std::optional<uint32_t> victim(Residency pool) const;
  bool enter(uint32_t expert, Residency pool);
  void place_requested(uint32_t expert);
  void move_on(uint32_t expert);
  void set(uint32_t expert, Residency residency);
  void count_activation(uint32_t expert);
  std::vector<PoolMove> changes_since(const std::vector<Residency>& before) const;

  PoolSlots slots_;
  const double tolerance_;
  const double growth_;    // of an activation's weight per request, instead of decaying all counts
  double activation_ = 1;  // weight of an activation now
  uint64_t requests_ = 0;
  PoolSlots occupied_;
  std::vector<Entry> entries_;
};

}  // namespace zipmoe
