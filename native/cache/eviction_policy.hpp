// Which resident record makes room for a new one.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string_view>

namespace zipmoe {

using RecordIndex = uint32_t;

// Told about every event of one pool; asked for a victim when the pool is full. Not thread-safe.
class EvictionPolicy {
 public:
  virtual ~EvictionPolicy() = default;
  virtual std::string_view name() const = 0;
  virtual void admitted(RecordIndex record) = 0;
  virtual void used(RecordIndex record) = 0;
  virtual void removed(RecordIndex record) = 0;
  // The first record in eviction order that may be evicted; nothing if there is none.
  virtual std::optional<RecordIndex> victim(const std::function<bool(RecordIndex)>& evictable) const = 0;
};

// Throws std::invalid_argument for an unknown name.
std::unique_ptr<EvictionPolicy> make_eviction_policy(std::string_view name, uint32_t record_count);

}  // namespace zipmoe
