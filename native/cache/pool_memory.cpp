#include "cache/pool_memory.hpp"

#include <stdexcept>
#include <string>
#include <utility>

namespace zipmoe {
namespace {

template <typename... Visitors>
struct Overloaded : Visitors... {
  using Visitors::operator()...;
};

}  // namespace

PoolMemory::ClassCounts PoolMemory::count_slots(const PoolClass& pool_class, uint32_t class_number,
                                                const std::vector<PoolGroup>& groups) {
  ClassCounts counts;
  for (const PoolGroup& group : groups) {
    if (group.pool_class != class_number) continue;
    const uint32_t both = group.slots[Residency::both_chunks];
    counts.full += group.slots[Residency::full];
    counts.parts[kExponentPart] += both + group.slots[Residency::exponent];
    counts.parts[kSignMantissaPart] += both + group.slots[Residency::sign_mantissa];
  }
  for (uint32_t part = 0; part < kPartsMax; ++part) {
    counts.parts[part] = pool_class.part_bytes[part] == 0 ? 0 : counts.parts[part] + pool_class.staging;
  }
  return counts;
}

uint64_t PoolMemory::reserved_bytes(const std::vector<PoolClass>& classes, const std::vector<PoolGroup>& groups) {
  uint64_t bytes = kHugePageBytes;  // the beginning is rounded up
  for (uint32_t number = 0; number < classes.size(); ++number) {
    const ClassCounts counts = count_slots(classes[number], number, groups);
    bytes += SlotPool::reserved_bytes(classes[number].full_bytes, counts.full);
    for (uint32_t part = 0; part < kPartsMax; ++part) {
      bytes += SlotPool::reserved_bytes(classes[number].part_bytes[part], counts.parts[part]);
    }
    if (classes[number].exponent_buffers > 0) {
      bytes += SlotPool::reserved_bytes(classes[number].exponent_bytes, classes[number].exponent_buffers);
    }
  }
  return bytes;
}

PoolMemory::PoolMemory(Arena& arena, uint64_t base_offset, std::vector<PoolClass> classes,
                       std::vector<PoolGroup> groups, uint32_t record_count)
    : classes_(std::move(classes)), groups_(std::move(groups)), entries_(record_count), held_(groups_.size()) {
  parts_ = !classes_.empty() && classes_.front().part_bytes[kSignMantissaPart] > 0 ? 2 : 1;
  for (uint32_t group = 0; group < groups_.size(); ++group) {
    const PoolGroup& shape = groups_[group];
    if (shape.pool_class >= classes_.size()) throw std::invalid_argument("a group has an unknown size class");
    if (parts_ == 1 && (shape.slots[Residency::sign_mantissa] > 0 || shape.slots[Residency::exponent] > 0)) {
      throw std::invalid_argument("pools S and E need a codec whose parts can be held apart");
    }
    for (uint32_t number = 0; number < shape.experts.size(); ++number) {
      Entry& found = entries_.at(shape.experts[number]);
      if (found.expert) throw std::invalid_argument("an expert belongs to two groups");
      found.expert = Expert{group, number};
    }
  }
  uint64_t offset = round_up(base_offset, kHugePageBytes);
  const auto make_pool = [&](uint64_t slot_bytes, uint32_t slots) {
    auto pool = std::make_unique<SlotPool>(arena, offset, slot_bytes, slots);
    pool->grow(slots);
    offset += SlotPool::reserved_bytes(slot_bytes, slots);
    return pool;
  };
  for (uint32_t number = 0; number < classes_.size(); ++number) {
    const PoolClass& shape = classes_[number];
    if (shape.staging == 0) throw std::invalid_argument("at least one expert must be staged");
    if ((shape.part_bytes[kSignMantissaPart] > 0) != (parts_ == 2)) {
      throw std::invalid_argument("size classes of one model have the same parts");
    }
    const ClassCounts counts = count_slots(shape, number, groups_);
    ClassPools pools;
    pools.full = make_pool(shape.full_bytes, counts.full);
    for (uint32_t part = 0; part < parts_; ++part) {
      pools.parts[part] = make_pool(shape.part_bytes[part], counts.parts[part]);
    }
    if (shape.exponent_buffers > 0) {
      pools.exponents = make_pool(shape.exponent_bytes, shape.exponent_buffers);
      while (std::optional<Slot> slot = pools.exponents->acquire()) pools.exponent_buffers.push_back(std::move(*slot));
    }
    pools_.push_back(std::move(pools));
  }
}

const PoolMemory::Entry& PoolMemory::entry(RecordIndex record) const {
  if (record >= entries_.size() || !entries_[record].expert) {
    throw std::out_of_range("record " + std::to_string(record) + " is not an expert");
  }
  return entries_[record];
}

PoolMemory::Entry& PoolMemory::entry(RecordIndex record) {
  return const_cast<Entry&>(std::as_const(*this).entry(record));
}

PoolMemory::Expert PoolMemory::expert(RecordIndex record) const { return *entry(record).expert; }

Residency PoolMemory::residency_of(const Held& held) {
  return std::visit(Overloaded{[](const Miss&) { return Residency::miss; }, [](const Full&) { return Residency::full; },
                               [](const BothChunks&) { return Residency::both_chunks; },
                               [](const Packed&) { return Residency::both_chunks; },
                               [](const SignMantissaChunk&) { return Residency::sign_mantissa; },
                               [](const ExponentChunk&) { return Residency::exponent; }},
                    held);
}

Residency PoolMemory::residency(RecordIndex record) const { return residency_of(entry(record).held); }

bool PoolMemory::stage_missing(RecordIndex record, StagedParts& staged) {
  const std::array<uint8_t*, kPartsMax> present = places(record, staged);
  ClassPools& pools = pools_of(entry(record));
  for (uint32_t part = 0; part < parts_; ++part) {
    if (present[part] == nullptr && pools.parts[part]->free_slots() == 0) return false;
  }
  for (uint32_t part = 0; part < parts_; ++part) {
    if (present[part] == nullptr) staged[part] = pools.parts[part]->acquire();
  }
  return true;
}

bool PoolMemory::stage_sign_mantissa(RecordIndex record, StagedParts& staged) {
  if (parts_ < kPartsMax) throw std::logic_error("the record has no parts that could be held apart");
  staged[kSignMantissaPart] = pools_of(entry(record)).parts[kSignMantissaPart]->acquire();
  return staged[kSignMantissaPart].has_value();
}

std::array<uint8_t*, kPartsMax> PoolMemory::places(RecordIndex record, const StagedParts& staged) const {
  std::array<uint8_t*, kPartsMax> places{};
  std::visit(Overloaded{[](const Miss&) {}, [](const Full&) {},
                        [&](const BothChunks& held) {
                          places[kExponentPart] = held.exponent.data();
                          places[kSignMantissaPart] = held.sign_mantissa.data();
                        },
                        [&](const Packed& held) { places[kExponentPart] = held.record.data(); },
                        [&](const SignMantissaChunk& held) { places[kSignMantissaPart] = held.sign_mantissa.data(); },
                        [&](const ExponentChunk& held) { places[kExponentPart] = held.exponent.data(); }},
             entry(record).held);
  for (uint32_t part = 0; part < parts_; ++part) {
    if (staged[part]) places[part] = staged[part]->data();
  }
  return places;
}

void PoolMemory::replace(Entry& found, Held held) {
  const Residency before = residency_of(found.held);
  const Residency after = residency_of(held);
  PoolSlots& counts = held_[found.expert->group];
  if (before != Residency::miss) --counts[before];
  if (after != Residency::miss) ++counts[after];
  if (before != Residency::miss && after < before) ++promotions_;
  if (after > before) ++(after == Residency::miss ? dropped_ : demotions_);
  found.held = std::move(held);
}

void PoolMemory::settle(RecordIndex record, StagedParts staged, Residency to) {
  Entry& found = entry(record);
  if (to == residency_of(found.held)) return;  // what is staged goes back
  if (parts_ == 1 && (to == Residency::sign_mantissa || to == Residency::exponent)) {
    throw std::logic_error("the record has no parts that could be held apart");
  }
  if (to == Residency::full) throw std::logic_error("an expert enters the pool of decoded ones decoded");
  const std::array<uint8_t*, kPartsMax> present = places(record, staged);
  const bool needs_exponent = holds_exponent(to);
  const bool needs_sign_mantissa = holds_sign_mantissa(to) && parts_ > 1;
  if ((needs_exponent && present[kExponentPart] == nullptr) ||
      (needs_sign_mantissa && present[kSignMantissaPart] == nullptr)) {
    throw std::logic_error("a part that is to be kept is not in memory");
  }
  std::visit(Overloaded{[](Miss&) {}, [](Full&) {},
                        [&](BothChunks& held) {
                          staged[kExponentPart] = std::move(held.exponent);
                          staged[kSignMantissaPart] = std::move(held.sign_mantissa);
                        },
                        [&](Packed& held) { staged[kExponentPart] = std::move(held.record); },
                        [&](SignMantissaChunk& held) { staged[kSignMantissaPart] = std::move(held.sign_mantissa); },
                        [&](ExponentChunk& held) { staged[kExponentPart] = std::move(held.exponent); }},
             found.held);
  const auto take = [&](uint32_t part) { return std::move(*staged[part]); };
  if (needs_exponent && needs_sign_mantissa) {
    replace(found, BothChunks{take(kExponentPart), take(kSignMantissaPart)});
  } else if (to == Residency::both_chunks) {
    replace(found, Packed{take(kExponentPart)});
  } else if (needs_exponent) {
    replace(found, ExponentChunk{take(kExponentPart)});
  } else if (needs_sign_mantissa) {
    replace(found, SignMantissaChunk{take(kSignMantissaPart)});
  } else {
    replace(found, Miss{});
  }
}

std::optional<Slot> PoolMemory::acquire_full(RecordIndex record) { return pools_of(entry(record)).full->acquire(); }

void PoolMemory::settle_full(RecordIndex record, Slot decoded) { replace(entry(record), Full{std::move(decoded)}); }

const uint8_t* PoolMemory::full(RecordIndex record) const {
  const Full* held = std::get_if<Full>(&entry(record).held);
  if (held == nullptr) throw std::logic_error("the expert is not decoded");
  return held->weights.data();
}

std::vector<uint8_t*> PoolMemory::exponent_buffers(uint32_t group) const {
  std::vector<uint8_t*> buffers;
  for (const Slot& slot : pools_.at(groups_.at(group).pool_class).exponent_buffers) buffers.push_back(slot.data());
  return buffers;
}

void PoolMemory::resize(std::span<const PoolSlots> slots) {
  if (slots.size() != groups_.size()) throw std::invalid_argument("every group needs its numbers of slots");
  for (uint32_t group = 0; group < groups_.size(); ++group) {
    for (uint32_t pool = 0; pool < kPools; ++pool) {
      if (held_[group].experts[pool] > slots[group].experts[pool]) {
        throw std::logic_error("a pool holds more experts than it is to have slots");
      }
    }
  }
  for (uint32_t group = 0; group < groups_.size(); ++group) groups_[group].slots = slots[group];
  std::vector<ClassCounts> wanted;
  for (uint32_t number = 0; number < classes_.size(); ++number) {
    wanted.push_back(count_slots(classes_[number], number, groups_));
  }
  for (Entry& found : entries_) {
    if (!found.expert) continue;
    const uint32_t number = groups_[found.expert->group].pool_class;
    ClassPools& pools = pools_[number];
    const auto move_part = [&](Slot& slot, uint32_t part) {
      pools.parts[part]->move_below(slot, wanted[number].parts[part]);
    };
    std::visit(Overloaded{[](Miss&) {}, [&](Full& held) { pools.full->move_below(held.weights, wanted[number].full); },
                          [&](BothChunks& held) {
                            move_part(held.exponent, kExponentPart);
                            move_part(held.sign_mantissa, kSignMantissaPart);
                          },
                          [&](Packed& held) { move_part(held.record, kExponentPart); },
                          [&](SignMantissaChunk& held) { move_part(held.sign_mantissa, kSignMantissaPart); },
                          [&](ExponentChunk& held) { move_part(held.exponent, kExponentPart); }},
               found.held);
  }
  for (uint32_t number = 0; number < classes_.size(); ++number) {
    const auto change = [](SlotPool& pool, uint32_t count) {
      count < pool.slots() ? pool.shrink(count) : pool.grow(count);
    };
    change(*pools_[number].full, wanted[number].full);
    for (uint32_t part = 0; part < parts_; ++part) change(*pools_[number].parts[part], wanted[number].parts[part]);
  }
}

uint64_t PoolMemory::slot_bytes() const {
  uint64_t bytes = 0;
  for (const ClassPools& pools : pools_) {
    bytes += pools.full->slot_bytes() * pools.full->slots();
    for (uint32_t part = 0; part < parts_; ++part) {
      bytes += pools.parts[part]->slot_bytes() * pools.parts[part]->slots();
    }
    if (pools.exponents) bytes += pools.exponents->slot_bytes() * pools.exponents->slots();
  }
  return bytes;
}

}  // namespace zipmoe
