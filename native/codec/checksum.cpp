#include "codec/checksum.hpp"

#define XXH_INLINE_ALL
#include <xxhash.h>

#include <new>

namespace zipmoe {
namespace {

XXH3_state_t* state_in(std::byte* memory) { return std::launder(reinterpret_cast<XXH3_state_t*>(memory)); }
const XXH3_state_t* state_in(const std::byte* memory) {
  return std::launder(reinterpret_cast<const XXH3_state_t*>(memory));
}

}  // namespace

uint64_t xxh3_64(std::span<const uint8_t> bytes) noexcept { return XXH3_64bits(bytes.data(), bytes.size()); }

Xxh3Stream::Xxh3Stream() noexcept {
  static_assert(sizeof(XXH3_state_t) <= kStateBytes && alignof(XXH3_state_t) <= alignof(Xxh3Stream));
  auto* state = ::new (static_cast<void*>(state_)) XXH3_state_t;
  XXH3_INITSTATE(state);
  XXH3_64bits_reset(state);
}

void Xxh3Stream::update(std::span<const uint8_t> bytes) noexcept {
  XXH3_64bits_update(state_in(state_), bytes.data(), bytes.size());
}

uint64_t Xxh3Stream::digest() const noexcept { return XXH3_64bits_digest(state_in(state_)); }

}  // namespace zipmoe
