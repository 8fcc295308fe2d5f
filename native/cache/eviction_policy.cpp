#include "cache/eviction_policy.hpp"

#include <stdexcept>
#include <string>

#include "cache/lru.hpp"

namespace zipmoe {

std::unique_ptr<EvictionPolicy> make_eviction_policy(std::string_view name, uint32_t record_count) {
  if (name == "lru") return std::make_unique<LeastRecentlyUsed>(record_count);
  throw std::invalid_argument("unknown eviction policy: " + std::string(name));
}

}  // namespace zipmoe
