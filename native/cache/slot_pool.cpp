#include "cache/slot_pool.hpp"

#include <algorithm>
#include <cstring>
#include <functional>
#include <stdexcept>
#include <utility>

namespace zipmoe {

Slot::Slot(Slot&& other) noexcept : pool_(std::exchange(other.pool_, nullptr)), number_(other.number_) {}

Slot& Slot::operator=(Slot&& other) noexcept {
  std::swap(pool_, other.pool_);
  std::swap(number_, other.number_);
  return *this;
}

Slot::~Slot() {
  if (pool_ != nullptr) pool_->give_back(number_);
}

uint8_t* Slot::data() const { return pool_->data(number_); }

SlotPool::SlotPool(Arena& arena, uint64_t offset, uint64_t slot_bytes, uint32_t slot_limit)
    : arena_(arena), offset_(offset), slot_bytes_(slot_bytes), slot_limit_(slot_limit) {
  if (slot_bytes == 0 || slot_bytes % 4096 != 0 || offset % 4096 != 0) {
    throw std::invalid_argument("slots must be a multiple of 4096 bytes");
  }
  free_.reserve(slot_limit);  // giving a slot back must not fail
}

std::optional<Slot> SlotPool::acquire() {
  if (free_.empty()) return std::nullopt;
  std::pop_heap(free_.begin(), free_.end(), std::greater<>());
  const uint32_t number = free_.back();
  free_.pop_back();
  arena_.claim(offset_ + slot_bytes_ * number, slot_bytes_ + kReadableTailBytes);
  return Slot(*this, number);
}

void SlotPool::give_back(uint32_t number) {
  free_.push_back(number);
  std::push_heap(free_.begin(), free_.end(), std::greater<>());
}

void SlotPool::grow(uint32_t slots) {
  if (slots > slot_limit_) throw std::invalid_argument("more slots than the pool may have");
  if (slots <= slots_) return;
  arena_.commit(offset_, slot_bytes_ * slots);
  for (uint32_t number = slots_; number < slots; ++number) give_back(number);
  slots_ = slots;
}

void SlotPool::move_below(Slot& slot, uint32_t slots) {
  if (slot.number_ < slots) return;
  std::optional<Slot> lower = acquire();
  if (!lower || lower->number_ >= slots) throw std::logic_error("more slots are in use than the pool is to have");
  std::memcpy(lower->data(), slot.data(), slot_bytes_);
  slot = std::move(*lower);
}

void SlotPool::shrink(uint32_t slots) {
  if (slots >= slots_) return;
  const auto above = [slots](uint32_t number) { return number >= slots; };
  if (std::count_if(free_.begin(), free_.end(), above) != slots_ - slots) {
    throw std::logic_error("a slot that is in use would be given up");
  }
  std::erase_if(free_, above);
  std::make_heap(free_.begin(), free_.end(), std::greater<>());
  const uint64_t kept_bytes = slot_bytes_ * slots;
  arena_.release(offset_ + kept_bytes, round_up(slot_bytes_ * slots_, kHugePageBytes) - kept_bytes);
  slots_ = slots;
}

}  // namespace zipmoe
