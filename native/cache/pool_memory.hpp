// The memory of the pools F, C, S and E: which parts of which expert are in memory, and in which slots.
//
// The parts of a record (E-chunks and SM-chunks of all its matrices; one packed part with other codecs) have slots of
// their own: an expert in C holds one of each, one in S or E only its one. So C, S and E share two rows of equal slots,
// nothing fragments, and moving between them drops a slot or adds one and never copies. Decoded experts (F) have a
// third row. Beside the pools' slots there are staging slots for experts that are being read or executed, and buffers
// for exponents that are decompressed before their expert is executed. Not thread-safe.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <variant>
#include <vector>

#include "cache/eviction_policy.hpp"
#include "cache/pool_slots.hpp"
#include "cache/slot_pool.hpp"

namespace zipmoe {

inline constexpr uint32_t kPartsMax = 2;
inline constexpr uint32_t kExponentPart = 0;  // the order of the extents; a packed record is part 0, too
inline constexpr uint32_t kSignMantissaPart = 1;

// Groups of experts of similar size share slots.
struct PoolClass {
  uint64_t full_bytes = 0;                       // of an F slot, a multiple of 4096
  std::array<uint64_t, kPartsMax> part_bytes{};  // of the slots of each part, multiples of 4096; 0: no such part
  uint32_t staging = 1;                          // experts that can be read or executed beside those in the pools
  uint64_t exponent_bytes = 0;                   // decompressed exponents of one expert, a multiple of 4096
  uint32_t exponent_buffers = 0;                 // experts whose exponents can be decompressed ahead
};

struct PoolGroup {
  uint32_t pool_class = 0;
  std::vector<RecordIndex> experts;  // record of each expert
  PoolSlots slots;
};

// Slots of parts that an open request brought into memory for one expert.
using StagedParts = std::array<std::optional<Slot>, kPartsMax>;

class PoolMemory {
 public:
  // Throws std::invalid_argument, std::system_error. `base_offset`: where in the arena the slots begin.
  PoolMemory(Arena& arena, uint64_t base_offset, std::vector<PoolClass> classes, std::vector<PoolGroup> groups,
             uint32_t record_count);

  static uint64_t reserved_bytes(const std::vector<PoolClass>& classes, const std::vector<PoolGroup>& groups);

  struct Expert {
    uint32_t group;
    uint32_t number;  // in the group
  };
  Expert expert(RecordIndex record) const;  // throws std::out_of_range if the record is none
  const std::vector<PoolGroup>& groups() const { return groups_; }
  uint32_t parts() const { return parts_; }

  Residency residency(RecordIndex record) const;
  // Experts in each pool.
  const PoolSlots& held(uint32_t group) const { return held_.at(group); }

  // Slots for the parts that are not in memory, all or none of them; false: there are too few free ones. Not for an
  // expert in F.
  bool stage_missing(RecordIndex record, StagedParts& staged);
  // A slot for the SM-chunks of an expert in F, of a separable codec; false: there is no free one.
  bool stage_sign_mantissa(RecordIndex record, StagedParts& staged);
  // Where the parts are: in the record's residency or staged; nullptr: not in memory.
  std::array<uint8_t*, kPartsMax> places(RecordIndex record, const StagedParts& staged) const;

  // Makes the residency `to`, which is not F: takes the parts that it needs from the present residency and from
  // `staged`, and drops the others. Throws std::logic_error if a part is not in memory.
  void settle(RecordIndex record, StagedParts staged, Residency to);
  // An F slot for a record, if one is free; settle_full() drops all other parts.
  std::optional<Slot> acquire_full(RecordIndex record);
  void settle_full(RecordIndex record, Slot decoded);
  const uint8_t* full(RecordIndex record) const;  // throws std::logic_error unless it is in F

  // Room for the decompressed exponents of that many experts.
  std::vector<uint8_t*> exponent_buffers(uint32_t group) const;

  // Other numbers of slots per group, at most those at the beginning. Nobody may hold more than they allow, and
  // nothing may be staged.
  void resize(std::span<const PoolSlots> slots);

  uint64_t slot_bytes() const;                         // of all slots
  uint64_t dropped() const { return dropped_; }        // experts of which nothing is in memory any more
  uint64_t promotions() const { return promotions_; }  // to a more complete residency, from memory or from disk
  uint64_t demotions() const { return demotions_; }    // parts dropped, others kept

 private:
  struct Full {
    Slot weights;
  };
  struct BothChunks {
    Slot exponent;
    Slot sign_mantissa;
  };
  struct Packed {  // the one part of a codec that is not separable
    Slot record;
  };
  struct SignMantissaChunk {
    Slot sign_mantissa;
  };
  struct ExponentChunk {
    Slot exponent;
  };
  struct Miss {};
  using Held = std::variant<Miss, Full, BothChunks, Packed, SignMantissaChunk, ExponentChunk>;

  struct Entry {
    std::optional<Expert> expert;
    Held held;
  };
  struct ClassPools {
    std::unique_ptr<SlotPool> full;
    std::array<std::unique_ptr<SlotPool>, kPartsMax> parts;
    std::unique_ptr<SlotPool> exponents;  // none without buffers
    std::vector<Slot> exponent_buffers;   // all slots of it
  };
  struct ClassCounts {
    uint32_t full = 0;
    std::array<uint32_t, kPartsMax> parts{};
  };

  static Residency residency_of(const Held& held);
  static ClassCounts count_slots(const PoolClass& pool_class, uint32_t class_number,
                                 const std::vector<PoolGroup>& groups);
  const Entry& entry(RecordIndex record) const;
  Entry& entry(RecordIndex record);
  ClassPools& pools_of(const Entry& found) { return pools_[groups_[found.expert->group].pool_class]; }
  void replace(Entry& found, Held held);

  std::vector<PoolClass> classes_;
  std::vector<PoolGroup> groups_;
  uint32_t parts_ = 0;
  std::vector<ClassPools> pools_;  // before the entries, whose slots go back to them
  std::vector<Entry> entries_;     // by record
  std::vector<PoolSlots> held_;    // by group
  uint64_t dropped_ = 0;
  uint64_t promotions_ = 0;
  uint64_t demotions_ = 0;
};

}  // namespace zipmoe
