// Which policy rules the pools, where replays decide: the engine's requests go to ghost caches as well when they end,
// and what these find out is adopted before the next one.
#include <stdexcept>
#include <utility>

#include "cache/replayed_pools.hpp"
#include "runtime/engine.hpp"

namespace zipmoe {
namespace {

// Bytes that are read for an expert of which `residency` is in memory.
uint64_t missing_bytes(const PoolClass& shape, Residency residency) {
  uint64_t bytes = 0;
  const bool full = residency == Residency::full;
  if (!full && !holds_exponent(residency)) bytes += shape.part_bytes[kExponentPart];
  if (!full && !holds_sign_mantissa(residency)) bytes += shape.part_bytes[kSignMantissaPart];
  return bytes;
}

// In bytes to be read. Decoding counts as the reads that take as long; where no pool keeps decoded experts it is the
// same work whoever is in memory, and is left out.
ResidencyCosts costs_of(const PoolClass& shape, const PoolSlots& slots, double reads_per_decoded_byte) {
  ResidencyCosts costs{};
  const bool decoded = slots[Residency::full] > 0;
  for (size_t i = 0; i < costs.size(); ++i) {
    const auto residency = static_cast<Residency>(i);
    costs[i] = static_cast<double>(missing_bytes(shape, residency));
    if (decoded && residency != Residency::full) {
      costs[i] += reads_per_decoded_byte * static_cast<double>(shape.full_bytes);
    }
  }
  return costs;
}

}  // namespace

void Engine::open_policy_replay() {
  if (!options_.policy_replay) return;
  std::vector<ReplayedPool> pools;
  if (pool_memory_) {
    for (size_t group = 0; group < dispatch_.size(); ++group) {
      const PoolClass& shape = options_.pools->classes.at(options_.pools->groups[group].pool_class);
      const PoolOptions& own = dispatch_[group]->options();
      pools.push_back({own, costs_of(shape, own.slots, 0), own.experts});
    }
  } else {
    const auto records = static_cast<uint32_t>(table_.size());
    for (const SizeClass& shape : cache_->classes()) {
      ReplayedPool pool;
      pool.options.experts = records;
      pool.options.parameters = options_.policy_parameters;
      pool.options.slots[Residency::both_chunks] = shape.slots;
      pool.options.tolerance = records;  // the single pool takes in whoever was requested
      pool.users = shape.slot_limit;
      pool.costs[static_cast<size_t>(Residency::miss)] = static_cast<double>(shape.slot_bytes);
      pools.push_back(pool);
    }
  }
  ReplayOptions replay = *options_.policy_replay;
  // With pools every group is asked once in a step; the single pool's classes are all told about every request.
  replay.requests_per_step = pool_memory_
                                 ? static_cast<uint32_t>(dispatch_.size())
                                 : options_.policy_parameters.requests_per_step * static_cast<uint32_t>(pools.size());
  replay_ = std::make_unique<PolicyReplay>(std::move(pools), std::move(replay));
  adopt_chosen_policy();
}

void Engine::adopt_chosen_policy() {
  for (uint32_t group = 0; group < dispatch_.size(); ++group) {
    dispatch_[group]->adopt(replay_->policy(group, residents(*dispatch_[group])));
  }
  if (!cache_) return;
  for (uint32_t size_class = 0; size_class < cache_->classes().size(); ++size_class) {
    std::vector<bool> resident(table_.size());
    for (RecordIndex record = 0; record < resident.size(); ++record) {
      resident[record] = cache_->size_class(record) == size_class && cache_->resident(record);
    }
    cache_->adopt(size_class, replay_->policy(size_class, resident));
  }
}

void Engine::adopt_changed_policy() {
  if (replay_ && replay_->take_change()) adopt_chosen_policy();
}

void Engine::replay_request(const std::vector<RecordIndex>& records) {
  if (!replay_) return;
  if (cache_) {
    const bool comparable = !cache_->sweeping();
    for (uint32_t size_class = 0; size_class < cache_->classes().size(); ++size_class) {
      std::vector<uint32_t> own;
      for (const RecordIndex record : records) {
        if (cache_->size_class(record) == size_class) own.push_back(record);
      }
      replay_->request(size_class, own, comparable);
    }
    return;
  }
  if (records.empty()) return;
  const uint32_t group = pool_memory_->expert(records.front()).group;
  std::vector<uint32_t> experts;
  for (const RecordIndex record : records) experts.push_back(pool_memory_->expert(record).number);
  const bool decoded = counters_.decode_seconds > 0;
  const ReadRates rates = measured_rates();
  const PoolClass& shape = options_.pools->classes[options_.pools->groups[group].pool_class];
  replay_->set_costs(group, costs_of(shape, dispatch_[group]->options().slots,
                                     decoded ? rates.read_bytes_per_second / rates.decode_bytes_per_second : 0));
  replay_->request(group, experts);
}

// The ghosts have the slots that the pool's policy rules: those that are kept for predictions are not among them.
void Engine::resize_ghosts(uint32_t size_class) {
  if (!replay_) return;
  const uint32_t slots = cache_->classes()[size_class].slots - cache_->spared(size_class);
  replay_->resize(size_class, {{0, slots, 0, 0}});
}

std::string Engine::policy() const {
  std::lock_guard lock(mutex_);
  const PolicyParameters& parameters = options_.policy_parameters;
  const PolicyCandidate fixed{options_.eviction_policy, parameters.half_life_steps};
  return replay_ ? replay_->chosen().description() : fixed.description();
}

}  // namespace zipmoe
