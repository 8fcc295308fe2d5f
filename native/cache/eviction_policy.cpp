#include "cache/eviction_policy.hpp"

#include <array>
#include <stdexcept>
#include <string>

#include "cache/fifo.hpp"
#include "cache/lfu.hpp"
#include "cache/lfuda.hpp"
#include "cache/lru.hpp"
#include "cache/marking.hpp"
#include "cache/zipmoe.hpp"

namespace zipmoe {
namespace {

constexpr std::array<std::string_view, 6> kNames = {"zipmoe", "lru", "lfu", "lfuda", "fifo", "marking"};

}  // namespace

std::span<const std::string_view> eviction_policy_names() { return kNames; }

std::unique_ptr<EvictionPolicy> make_eviction_policy(std::string_view name, uint32_t record_count,
                                                     const PolicyParameters& parameters) {
  if (name == "lru") return std::make_unique<LeastRecentlyUsed>(record_count);
  if (name == "fifo") return std::make_unique<FirstInFirstOut>(record_count);
  if (name == "lfu") return std::make_unique<LeastFrequentlyUsed>(record_count);
  if (name == "lfuda") return std::make_unique<LeastFrequentlyUsedWithAgeing>(record_count);
  if (name == "marking") return std::make_unique<RandomMarking>(record_count, parameters.seed);
  if (name == "zipmoe") {
    return std::make_unique<DecayingFrequency>(record_count, parameters.half_life_steps, parameters.requests_per_step);
  }
  throw std::invalid_argument("unknown eviction policy: " + std::string(name));
}

}  // namespace zipmoe
