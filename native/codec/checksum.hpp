#pragma once
#include <cstddef>
#include <cstdint>
#include <span>

namespace zipmoe {

// XXH3 with 64 bits and seed 0, the checksum of every extent of a packed folder.
uint64_t xxh3_64(std::span<const uint8_t> bytes) noexcept;

// The same of bytes that come piece by piece, in their order.
class Xxh3Stream {
 public:
  Xxh3Stream() noexcept;
  void update(std::span<const uint8_t> bytes) noexcept;
  // Of all bytes so far.
  uint64_t digest() const noexcept;

 private:
  static constexpr size_t kStateBytes = 576;
  alignas(64) std::byte state_[kStateBytes];  // xxHash's own, which only its header knows
};

}  // namespace zipmoe
