#pragma once
#include <cstdint>
#include <span>

namespace zipmoe {

// XXH3 with 64 bits and seed 0, the checksum of every extent of a packed folder.
uint64_t xxh3_64(std::span<const uint8_t> bytes) noexcept;

}  // namespace zipmoe
