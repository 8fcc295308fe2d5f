// The compressed pool: fixed slots in the arena, which record lies in which slot, and who may not be evicted.
// Slots come in size classes, so that groups of small experts do not waste the space of the largest; within a class any
// record fits into any slot and nothing fragments. Not thread-safe: the executor owns it.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "cache/arena.hpp"
#include "cache/eviction_policy.hpp"
#include "cache/sweep.hpp"

namespace zipmoe {

struct SizeClass {
  uint64_t slot_bytes = 0;  // multiple of 4096
  uint32_t slot_limit = 0;  // most slots that this class will ever have: the number of its records
  uint32_t slots = 0;       // slots now
};

// Who does not make room during a pass through all layers: nobody, records that later layers are likely to ask for, or
// all but those that the layer at hand is done with. Later layers that hold more than their share make room first, and
// always.
enum class Spared : uint8_t { nobody, awaited, other_layers };

// Where what is read ahead finds room: in the slots that are spared for that; in unused ones; in a pass through all
// layers also in those of records that the pass has passed, or of layers to come that hold more than their share; or,
// when it is about to begin, of any that are not pinned.
enum class AheadRoom : uint8_t { spared, unused, passed, any };

class ExpertCache {
 public:
  static constexpr uint32_t kSlotsMin = 2;            // without which reads and computation could not overlap
  static constexpr uint32_t kNotCached = UINT32_MAX;  // class of records that never enter the cache (dense ones)

  // `base_offset`: where in the arena the pool begins. `class_of_record` has one entry per record.
  ExpertCache(Arena& arena, uint64_t base_offset, std::vector<SizeClass> classes, std::vector<uint32_t> class_of_record,
              std::string_view policy, const PolicyParameters& parameters = {});

  // Address space that a pool of these classes needs at most.
  static uint64_t reserved_bytes(const std::vector<SizeClass>& classes);

  // A sparse layer asks for these distinct records: the policies count them, whether they are resident or not.
  void requested(std::span<const RecordIndex> records);
  // A pass through all layers is about to begin, and will ask for most of what is resident.
  void sweep_begins() { sweep_.begin(); }
  // Whether the last request was part of a pass during which the policy alone does not say who makes room.
  bool sweeping() const { return sweep_.sweeping(); }
  TurningSlots turning() const { return sweep_.turning(); }

  bool absent(RecordIndex record) const { return entry(record).state == State::absent; }
  bool resident(RecordIndex record) const { return entry(record).state == State::resident; }
  bool pinned(RecordIndex record) const { return entry(record).pins > 0; }
  const uint8_t* data(RecordIndex record) const;

  // A slot for a record that is to be read, evicting if need be; the record is pinned and not resident until admit().
  // nullptr if every slot of the class is pinned or holds a record that is `spared`.
  uint8_t* acquire(RecordIndex record, Spared spared = Spared::nobody);

  // Keeps that many slots of every class for records that may turn out not to be needed: the others share the rest, of
  // which at least kSlotsMin are left; none where every record has a slot. They are lent out again when a request has
  // pinned everything else.
  void spare(uint32_t slots) { spare_slots_ = slots; }
  // Like acquire(), for a record that may turn out not to be needed; nullptr if there is no room, or the record is not
  // absent. `spared`: it pushes nobody out of the slots that are left to the others; spared slots that claimed records
  // have taken with them are made up for by evicting. Otherwise all but kSlotsMin slots may be taken.
  uint8_t* acquire_ahead(RecordIndex record, AheadRoom room = AheadRoom::spared);
  // The record is needed: from now on as if it had been acquired. discard() gives it up instead.
  void claim(RecordIndex record);
  uint32_t spared(uint32_t size_class) const;
  void admit(RecordIndex record);    // its bytes are there and verified; stays pinned
  void discard(RecordIndex record);  // reading failed: the slot is free again
  void evict(RecordIndex record);    // must be resident and not pinned
  void pin(RecordIndex record);
  void unpin(RecordIndex record);
  void used(RecordIndex record);

  // From now on this policy decides about a class. It must hold exactly the class's resident records
  // (EvictionPolicy::holding): nothing moves. Between requests.
  void adopt(uint32_t size_class, std::unique_ptr<EvictionPolicy> policy);

  // Changes the number of slots of a class between requests (nothing may be pinned). Shrinking keeps the records that
  // the policy would keep and gives the memory back.
  void resize(uint32_t size_class, uint32_t slots);

  uint32_t size_class(RecordIndex record) const { return entry(record).size_class; }
  const std::vector<SizeClass>& classes() const { return classes_; }
  uint64_t slot_count() const;
  uint64_t pool_bytes() const;
  uint64_t resident_records() const;
  uint64_t evictions() const { return evictions_; }

 private:
  enum class State : uint8_t { absent, filling, resident };
  struct Entry {
    uint32_t size_class = kNotCached;
    uint32_t slot = 0;
    uint32_t pins = 0;
    State state = State::absent;
    bool ahead = false;  // acquired by acquire_ahead(), not yet claimed
  };
  struct Pool {
    uint64_t offset = 0;               // in the arena
    std::vector<uint32_t> free_slots;  // the next one to use is last
    std::vector<std::optional<RecordIndex>> occupants;
    std::unique_ptr<EvictionPolicy> policy;
    uint32_t ahead = 0;               // slots that acquire_ahead() has given out
    uint32_t layers = 0;              // that have records of this class
    std::vector<uint32_t> residents;  // by layer
  };

  const Entry& entry(RecordIndex record) const;
  Entry& cached_entry(RecordIndex record);
  uint8_t* slot_data(uint32_t size_class, uint32_t slot) const;
  void claim_memory(uint32_t size_class, uint32_t slot);
  std::optional<RecordIndex> victim(uint32_t size_class, Spared spared = Spared::nobody);
  void count_layers();
  uint32_t share(uint32_t size_class) const;
  std::optional<RecordIndex> victim_of_fullest_layer(uint32_t size_class, const EvictionPolicy::Predicate& evictable);
  uint32_t kept_free(uint32_t size_class) const;
  void evict_until_free(uint32_t size_class, size_t slots, Spared spared);
  uint8_t* fill(RecordIndex record);

  Arena& arena_;
  std::vector<SizeClass> classes_;
  std::vector<Pool> pools_;
  std::vector<Entry> entries_;
  Sweep sweep_;
  uint32_t spare_slots_ = 0;
  uint64_t evictions_ = 0;
};

}  // namespace zipmoe
