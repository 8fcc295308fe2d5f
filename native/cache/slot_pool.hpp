// Equal slots in a row in the arena. A slot is owned by a handle, so that none is lost or used twice.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "cache/arena.hpp"

namespace zipmoe {

class SlotPool;

// Owns one slot; gives it back at its end. The pool must outlive it. Not thread-safe, as the pool.
class Slot {
 public:
  Slot(Slot&& other) noexcept;
  Slot& operator=(Slot&& other) noexcept;
  Slot(const Slot&) = delete;
  Slot& operator=(const Slot&) = delete;
  ~Slot();

  uint8_t* data() const;

 private:
  friend class SlotPool;
  Slot(SlotPool& pool, uint32_t number) : pool_(&pool), number_(number) {}

  SlotPool* pool_;
  uint32_t number_;
};

class SlotPool {
 public:
  // `offset`: of the first slot in the arena, a multiple of 4096 as `slot_bytes` is. `slot_limit`: most slots that the
  // pool will ever have. Throws std::invalid_argument.
  SlotPool(Arena& arena, uint64_t offset, uint64_t slot_bytes, uint32_t slot_limit);
  SlotPool(const SlotPool&) = delete;
  SlotPool& operator=(const SlotPool&) = delete;

  // Address space of such a pool that begins at a whole huge page.
  static uint64_t reserved_bytes(uint64_t slot_bytes, uint32_t slot_limit) {
    return round_up(slot_bytes * slot_limit + kReadableTailBytes, kHugePageBytes);
  }

  uint64_t slot_bytes() const { return slot_bytes_; }
  uint32_t slots() const { return slots_; }
  uint32_t free_slots() const { return static_cast<uint32_t>(free_.size()); }

  // The lowest free slot, if there is one.
  std::optional<Slot> acquire();

  // More slots: commits their memory; throws std::system_error, std::invalid_argument above the limit.
  void grow(uint32_t slots);
  // Fewer slots, in two steps: each slot that is in use moves below the new end, with its bytes; then the memory behind
  // it goes back to the system. At most `slots` may be in use.
  void move_below(Slot& slot, uint32_t slots);
  void shrink(uint32_t slots);

 private:
  friend class Slot;
  uint8_t* data(uint32_t number) const { return arena_.data() + offset_ + slot_bytes_ * number; }
  void give_back(uint32_t number);

  Arena& arena_;
  const uint64_t offset_;
  const uint64_t slot_bytes_;
  const uint32_t slot_limit_;
  uint32_t slots_ = 0;
  std::vector<uint32_t> free_;  // a heap with the lowest number on top, so that a later shrink has little to move
};

}  // namespace zipmoe
