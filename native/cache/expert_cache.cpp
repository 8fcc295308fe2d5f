#include "cache/expert_cache.hpp"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>
#include <utility>

namespace zipmoe {

namespace {

std::vector<bool> are_experts(const std::vector<uint32_t>& class_of_record) {
  std::vector<bool> experts;
  for (const uint32_t size_class : class_of_record) experts.push_back(size_class != ExpertCache::kNotCached);
  return experts;
}

}  // namespace

ExpertCache::ExpertCache(Arena& arena, uint64_t base_offset, std::vector<SizeClass> classes,
                         std::vector<uint32_t> class_of_record, std::string_view policy,
                         const PolicyParameters& parameters)
    : arena_(arena), classes_(std::move(classes)), sweep_(are_experts(class_of_record), parameters.requests_per_step) {
  const auto record_count = static_cast<uint32_t>(class_of_record.size());
  uint64_t offset = round_up(base_offset, kHugePageBytes);
  for (SizeClass& size_class : classes_) {
    if (size_class.slot_bytes == 0 || size_class.slot_bytes % 4096 != 0) {
      throw std::invalid_argument("slots must be a multiple of 4096 bytes");
    }
    Pool pool;
    pool.offset = offset;
    pool.policy = make_eviction_policy(policy, record_count, parameters);
    pools_.push_back(std::move(pool));
    offset = round_up(offset + size_class.slot_bytes * size_class.slot_limit, kHugePageBytes);
  }
  entries_.resize(class_of_record.size());
  for (size_t i = 0; i < class_of_record.size(); ++i) {
    if (class_of_record[i] != kNotCached && class_of_record[i] >= classes_.size()) {
      throw std::invalid_argument("record " + std::to_string(i) + " has an unknown size class");
    }
    entries_[i].size_class = class_of_record[i];
  }
  count_layers();
  for (uint32_t i = 0; i < classes_.size(); ++i) resize(i, std::exchange(classes_[i].slots, 0));
}

uint64_t ExpertCache::reserved_bytes(const std::vector<SizeClass>& classes) {
  uint64_t bytes = kHugePageBytes;  // the pool's beginning is rounded up
  for (const SizeClass& size_class : classes) {
    bytes += round_up(size_class.slot_bytes * size_class.slot_limit, kHugePageBytes);
  }
  return bytes;
}

const ExpertCache::Entry& ExpertCache::entry(RecordIndex record) const {
  if (record >= entries_.size()) throw std::out_of_range("no record " + std::to_string(record));
  return entries_[record];
}

ExpertCache::Entry& ExpertCache::cached_entry(RecordIndex record) {
  if (record >= entries_.size() || entries_[record].size_class == kNotCached) {
    throw std::out_of_range("record " + std::to_string(record) + " is not an expert");
  }
  return entries_[record];
}

uint8_t* ExpertCache::slot_data(uint32_t size_class, uint32_t slot) const {
  return arena_.data() + pools_[size_class].offset + classes_[size_class].slot_bytes * slot;
}

void ExpertCache::claim_memory(uint32_t size_class, uint32_t slot) {
  const uint64_t slot_bytes = classes_[size_class].slot_bytes;
  arena_.claim(pools_[size_class].offset + slot_bytes * slot, slot_bytes + kReadableTailBytes);
}

const uint8_t* ExpertCache::data(RecordIndex record) const {
  const Entry& found = entry(record);
  if (found.state != State::resident) throw std::logic_error("record " + std::to_string(record) + " is not resident");
  return slot_data(found.size_class, found.slot);
}

void ExpertCache::requested(std::span<const RecordIndex> records) {
  sweep_.requested(records);
  // Every policy hears of every request, be it of none of its records: requests are their clock.
  for (uint32_t size_class = 0; size_class < pools_.size(); ++size_class) {
    std::vector<RecordIndex> own;
    for (const RecordIndex record : records) {
      if (cached_entry(record).size_class == size_class) own.push_back(record);
    }
    pools_[size_class].policy->requested(own);
  }
}

std::optional<RecordIndex> ExpertCache::victim(uint32_t size_class, Spared spared) {
  const auto idle = [this](RecordIndex record) { return entries_[record].pins == 0; };
  if (!sweep_.sweeping()) return pools_[size_class].policy->victim(idle);
  const std::vector<uint32_t>& residents = pools_[size_class].residents;
  if (const uint32_t most = share(size_class); std::ranges::any_of(residents, [&](uint32_t n) { return n > most; })) {
    const auto surplus = [&](RecordIndex record) {
      return idle(record) && sweep_.awaited(record) && residents[sweep_.layer(record)] > most;
    };
    if (const auto found = victim_of_fullest_layer(size_class, surplus)) return found;
  }
  const auto done = [&](RecordIndex record) {
    return idle(record) && sweep_.at_hand(record) && !sweep_.awaited(record);
  };
  if (spared == Spared::other_layers) return pools_[size_class].policy->victim(done);
  const auto passed = [&](RecordIndex record) { return idle(record) && !sweep_.awaited(record); };
  const std::optional<RecordIndex> found = victim_of_fullest_layer(size_class, passed);
  return found || spared == Spared::awaited ? found : victim_of_fullest_layer(size_class, idle);
}

void ExpertCache::count_layers() {
  std::vector<std::optional<uint32_t>> last(pools_.size());
  for (Pool& pool : pools_) pool.residents.resize(sweep_.layers());
  for (RecordIndex record = 0; record < entries_.size(); ++record) {
    const uint32_t size_class = entries_[record].size_class;
    if (size_class == kNotCached || last[size_class] == sweep_.layer(record)) continue;
    last[size_class] = sweep_.layer(record);
    ++pools_[size_class].layers;
  }
}

// Records of each layer that a pass leaves in the slots of a class. Where few slots are left beside those that go round
// there is nothing to share.
uint32_t ExpertCache::share(uint32_t size_class) const {
  const uint32_t slots = classes_[size_class].slots;
  const uint32_t layers = pools_[size_class].layers;
  const uint32_t turning = sweep_.turning().all();
  if (slots <= 2 * turning || slots - turning < layers) return UINT32_MAX;
  return (slots - turning) / layers;
}

// A pass uses everybody once, so that the policy would let whole layers go, the first ones, and the next pass would
// read those and then leave the disk idle. With as many of every layer the disk has something to do all the time.
// Among layers that are equally full the farthest makes room.
std::optional<RecordIndex> ExpertCache::victim_of_fullest_layer(uint32_t size_class,
                                                                const EvictionPolicy::Predicate& evictable) {
  std::vector<uint32_t> residents = pools_[size_class].residents;
  std::vector<bool> candidates(sweep_.layers());
  for (const std::optional<RecordIndex>& occupant : pools_[size_class].occupants) {
    if (occupant && resident(*occupant) && evictable(*occupant)) candidates[sweep_.layer(*occupant)] = true;
  }
  for (uint32_t layer = 0; layer < sweep_.layers(); ++layer) {
    if (!candidates[layer]) residents[layer] = 0;
  }
  const auto from_behind = std::max_element(residents.rbegin(), residents.rend());
  const auto fullest = static_cast<uint32_t>(residents.rend() - from_behind - 1);
  if (residents[fullest] == 0) return std::nullopt;
  return pools_[size_class].policy->victim(
      [&](RecordIndex record) { return sweep_.layer(record) == fullest && evictable(record); });
}

uint8_t* ExpertCache::acquire(RecordIndex record, Spared spared) {
  Entry& wanted = cached_entry(record);
  if (wanted.state != State::absent) throw std::logic_error("record " + std::to_string(record) + " has a slot already");
  evict_until_free(wanted.size_class, kept_free(wanted.size_class) + size_t{1}, spared);
  return pools_[wanted.size_class].free_slots.empty() ? nullptr : fill(record);
}

uint8_t* ExpertCache::fill(RecordIndex record) {
  Entry& wanted = entries_[record];
  Pool& pool = pools_[wanted.size_class];
  wanted.slot = pool.free_slots.back();
  pool.free_slots.pop_back();
  pool.occupants[wanted.slot] = record;
  wanted.state = State::filling;
  wanted.pins = 1;
  claim_memory(wanted.size_class, wanted.slot);
  return slot_data(wanted.size_class, wanted.slot);
}

// As far as there is somebody to evict.
void ExpertCache::evict_until_free(uint32_t size_class, size_t slots, Spared spared) {
  while (pools_[size_class].free_slots.size() < slots) {
    const std::optional<RecordIndex> evicted = victim(size_class, spared);
    if (!evicted) return;
    evict(*evicted);
  }
}

uint32_t ExpertCache::spared(uint32_t size_class) const {
  const SizeClass& shape = classes_.at(size_class);
  if (shape.slots >= shape.slot_limit) return 0;  // everybody has a slot: there is nothing to predict
  return std::min(spare_slots_, shape.slots > kSlotsMin ? shape.slots - kSlotsMin : 0);
}

uint32_t ExpertCache::kept_free(uint32_t size_class) const {
  const uint32_t spare = spared(size_class);
  return spare - std::min(spare, pools_[size_class].ahead);
}

uint8_t* ExpertCache::acquire_ahead(RecordIndex record, AheadRoom room) {
  Entry& wanted = cached_entry(record);
  Pool& pool = pools_[wanted.size_class];
  const uint32_t kept = kept_free(wanted.size_class);
  // Whoever asks next must find slots, whatever becomes of those that are taken here.
  const bool full = room == AheadRoom::spared ? kept == 0 : pool.ahead + kSlotsMin >= classes_[wanted.size_class].slots;
  if (wanted.state != State::absent || full) return nullptr;
  // Those that were claimed took spared slots with them: the others make up for it.
  // Nobody of those that the pass at hand is known to need, but for what a layer holds beyond its share.
  if (room != AheadRoom::unused) {
    evict_until_free(wanted.size_class, std::max(kept, uint32_t{1}),
                     room == AheadRoom::any ? Spared::nobody : Spared::awaited);
  }
  if (pool.free_slots.empty()) return nullptr;
  wanted.ahead = true;
  ++pool.ahead;
  return fill(record);
}

void ExpertCache::claim(RecordIndex record) {
  Entry& found = cached_entry(record);
  if (std::exchange(found.ahead, false)) --pools_[found.size_class].ahead;
}

void ExpertCache::admit(RecordIndex record) {
  Entry& found = cached_entry(record);
  if (found.state != State::filling) throw std::logic_error("admitted a record that was not being read");
  found.state = State::resident;
  ++pools_[found.size_class].residents[sweep_.layer(record)];
  pools_[found.size_class].policy->admitted(record);
}

void ExpertCache::discard(RecordIndex record) {
  Entry& found = cached_entry(record);
  if (found.state != State::filling) throw std::logic_error("discarded a record that was not being read");
  claim(record);
  Pool& pool = pools_[found.size_class];
  pool.occupants[found.slot].reset();
  pool.free_slots.push_back(found.slot);
  found.state = State::absent;
  found.pins = 0;
}

void ExpertCache::evict(RecordIndex record) {
  Entry& found = cached_entry(record);
  if (found.state != State::resident || found.pins > 0) throw std::logic_error("evicted a record that is in use");
  Pool& pool = pools_[found.size_class];
  pool.policy->removed(record);
  --pool.residents[sweep_.layer(record)];
  pool.occupants[found.slot].reset();
  pool.free_slots.push_back(found.slot);
  found.state = State::absent;
  ++evictions_;
}

void ExpertCache::pin(RecordIndex record) {
  Entry& found = cached_entry(record);
  if (found.state != State::resident) throw std::logic_error("pinned a record that is not resident");
  ++found.pins;
}

void ExpertCache::unpin(RecordIndex record) {
  Entry& found = cached_entry(record);
  if (found.pins == 0) throw std::logic_error("unpinned a record that is not pinned");
  --found.pins;
}

void ExpertCache::used(RecordIndex record) {
  Entry& found = cached_entry(record);
  if (found.state != State::resident) throw std::logic_error("used a record that is not resident");
  pools_[found.size_class].policy->used(record);
}

void ExpertCache::adopt(uint32_t size_class, std::unique_ptr<EvictionPolicy> policy) {
  pools_.at(size_class).policy = std::move(policy);
}

void ExpertCache::resize(uint32_t size_class, uint32_t slots) {
  SizeClass& shape = classes_.at(size_class);
  Pool& pool = pools_[size_class];
  if (slots > shape.slot_limit) throw std::invalid_argument("more slots than records");
  for (const std::optional<RecordIndex>& occupant : pool.occupants) {
    if (occupant && entries_[*occupant].pins > 0) throw std::logic_error("the pool was resized during a request");
  }
  const uint32_t old_slots = shape.slots;
  if (slots > old_slots) {
    arena_.commit(pool.offset, shape.slot_bytes * slots);
    pool.occupants.resize(slots);
    shape.slots = slots;
    // Low slots are used first, so that a later shrink has little to move.
    std::vector<uint32_t> fresh;
    for (uint32_t slot = slots; slot > old_slots; --slot) fresh.push_back(slot - 1);
    pool.free_slots.insert(pool.free_slots.begin(), fresh.begin(), fresh.end());
    return;
  }
  uint32_t survivors = old_slots - static_cast<uint32_t>(pool.free_slots.size());
  while (survivors > slots) {
    evict(*victim(size_class));
    --survivors;
  }
  std::sort(pool.free_slots.begin(), pool.free_slots.end(), std::greater<>());
  for (uint32_t slot = slots; slot < old_slots; ++slot) {
    if (!pool.occupants[slot]) continue;
    const RecordIndex moved = *pool.occupants[slot];
    const uint32_t target = pool.free_slots.back();  // the lowest free slot; below `slots`, as the survivors fit there
    pool.free_slots.pop_back();
    claim_memory(size_class, target);
    std::memcpy(slot_data(size_class, target), slot_data(size_class, slot), shape.slot_bytes);
    pool.occupants[target] = moved;
    entries_[moved].slot = target;
  }
  std::erase_if(pool.free_slots, [slots](uint32_t slot) { return slot >= slots; });
  pool.occupants.resize(slots);
  shape.slots = slots;
  const uint64_t kept_bytes = shape.slot_bytes * slots;
  arena_.release(pool.offset + kept_bytes, round_up(shape.slot_bytes * old_slots, kHugePageBytes) - kept_bytes);
}

uint64_t ExpertCache::slot_count() const {
  uint64_t count = 0;
  for (const SizeClass& shape : classes_) count += shape.slots;
  return count;
}

uint64_t ExpertCache::pool_bytes() const {
  uint64_t bytes = 0;
  for (const SizeClass& shape : classes_) bytes += shape.slot_bytes * shape.slots;
  return bytes;
}

uint64_t ExpertCache::resident_records() const {
  uint64_t count = 0;
  for (const Entry& found : entries_) count += found.state == State::resident ? 1 : 0;
  return count;
}

}  // namespace zipmoe
