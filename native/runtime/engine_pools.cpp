// The sizes of the pools, told and changed.
#include <algorithm>
#include <stdexcept>

#include "runtime/engine.hpp"
#include "runtime/full_demotion.hpp"

namespace zipmoe {

void Engine::resize_pools(std::span<const PoolSlots> slots) {
  std::lock_guard lock(mutex_);
  require_open();
  if (!pool_memory_) throw std::logic_error("this engine has one pool of whole records");
  if (request_) throw std::logic_error("the pools cannot change their sizes while a request is open");
  const std::vector<PoolGroup>& groups = options_.pools->groups;
  if (slots.size() != groups.size()) throw std::invalid_argument("every group needs its numbers of slots");
  for (uint32_t group = 0; group < groups.size(); ++group) {
    for (uint32_t pool = 0; pool < kPools; ++pool) {
      if (slots[group].experts[pool] > groups[group].slots.experts[pool]) {
        throw std::invalid_argument("more slots than at the beginning");
      }
    }
  }
  for (uint32_t group = 0; group < groups.size(); ++group) {
    if (replay_) replay_->resize(group, slots[group]);
    for (const Transition& move : dispatch_[group]->resize(slots[group])) {
      const RecordIndex record = groups[group].experts[move.expert];
      StagedParts staged;
      if (move.from == Residency::full && move.to == Residency::sign_mantissa &&
          pool_memory_->stage_sign_mantissa(record, staged)) {
        demote_to_sign_mantissa(table_, *pool_memory_, record, std::move(staged));
      } else {
        pool_memory_->settle(record, {}, move.to);
      }
    }
  }
  pool_memory_->resize(slots);
}

void Engine::resize_pool(uint32_t size_class, uint32_t slots) {
  std::lock_guard lock(mutex_);
  require_open();
  if (pool_memory_) throw std::logic_error("this engine has pools by residency");
  if (request_) throw std::logic_error("the pool cannot change its size while a request is open");
  if (slots == 0) throw std::invalid_argument("every size class needs a slot");
  if (look_ahead_) look_ahead_->clear();
  cache_->resize(size_class, slots);
  resize_ghosts(size_class);
}

std::vector<SizeClass> Engine::size_classes() const {
  std::lock_guard lock(mutex_);
  return cache_ ? cache_->classes() : std::vector<SizeClass>();
}

std::vector<PoolSlots> Engine::pool_slots() const {
  std::lock_guard lock(mutex_);
  std::vector<PoolSlots> slots;
  if (!pool_memory_) return slots;
  for (const PoolGroup& group : pool_memory_->groups()) slots.push_back(group.slots);
  return slots;
}

std::vector<PoolSlots> Engine::pool_occupancy() const {
  std::lock_guard lock(mutex_);
  std::vector<PoolSlots> occupancy;
  if (!pool_memory_) return occupancy;
  for (uint32_t group = 0; group < pool_memory_->groups().size(); ++group) {
    occupancy.push_back(pool_memory_->held(group));
  }
  return occupancy;
}

}  // namespace zipmoe
