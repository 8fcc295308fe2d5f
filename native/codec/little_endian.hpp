// Unaligned little-endian loads and stores. Only little-endian machines are supported, so these are plain copies.
#pragma once
#include <bit>
#include <cstdint>
#include <cstring>

namespace zipmoe {

static_assert(std::endian::native == std::endian::little, "the formats are little endian");

template <typename Integer>
Integer load_little_endian(const uint8_t* bytes) noexcept {
  Integer value;
  std::memcpy(&value, bytes, sizeof value);
  return value;
}

template <typename Integer>
void store_little_endian(uint8_t* bytes, Integer value) noexcept {
  std::memcpy(bytes, &value, sizeof value);
}

}  // namespace zipmoe
