// Which resident record makes room for a new one.
#pragma once

#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <span>
#include <string_view>

namespace zipmoe {

using RecordIndex = uint32_t;

struct PolicyParameters {
  // Steps of the model after which a past activation counts half (`zipmoe`); infinity: counts never decay.
  double half_life_steps = 16;
  // Requests that make one step: the number of sparse layers that share the pool.
  uint32_t requests_per_step = 1;
  uint64_t seed = 0;  // of `marking`
};

// Told about every event of one pool (or of several pools that share an order); asked for a victim when a pool is
// full. Deterministic: the same events give the same victims. Not thread-safe.
class EvictionPolicy {
 public:
  using Predicate = std::function<bool(RecordIndex)>;

  virtual ~EvictionPolicy() = default;
  virtual std::string_view name() const = 0;
  // A sparse layer asks for these distinct records, resident or not.
  virtual void requested(std::span<const RecordIndex> /*records*/) {}
  virtual void admitted(RecordIndex record) = 0;
  virtual void used(RecordIndex record) = 0;  // a resident one
  virtual void removed(RecordIndex record) = 0;
  // The first record in eviction order that may be evicted; nothing if there is none.
  virtual std::optional<RecordIndex> victim(const Predicate& evictable) = 0;

  // Number of records, resident or not, that were activated more often; nothing if the policy does not rank records.
  virtual std::optional<uint32_t> rank(RecordIndex /*record*/) const { return std::nullopt; }
  // Whether a use makes a record more worth keeping.
  virtual bool values_use() const { return true; }
  // A policy with the same memory of past requests, for a pool that holds these records and no others: what it is to go
  // on with where another one has ruled. `residents`: from the longest unused to the most recently used.
  virtual std::unique_ptr<EvictionPolicy> holding(std::span<const RecordIndex> residents) const = 0;
};

// Names that make_eviction_policy knows.
std::span<const std::string_view> eviction_policy_names();

// Throws std::invalid_argument for an unknown name or a parameter out of range.
std::unique_ptr<EvictionPolicy> make_eviction_policy(std::string_view name, uint32_t record_count,
                                                     const PolicyParameters& parameters = {});

}  // namespace zipmoe
