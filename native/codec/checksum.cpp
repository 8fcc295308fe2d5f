#include "codec/checksum.hpp"

#define XXH_INLINE_ALL
#include <xxhash.h>

#include <new>

#include "simd/checksum_kernels.hpp"
#include "simd/instruction_set.hpp"

namespace zipmoe {
namespace {

XXH3_state_t* state_in(std::byte* memory) { return std::launder(reinterpret_cast<XXH3_state_t*>(memory)); }
const XXH3_state_t* state_in(const std::byte* memory) {
  return std::launder(reinterpret_cast<const XXH3_state_t*>(memory));
}

// From so many bytes on, preparing a state is nothing beside what wide instructions save.
constexpr size_t kStreamBytesMin = size_t{64} << 10;

void update_state(XXH3_state_t* state, std::span<const uint8_t> bytes) noexcept {
#if defined(__x86_64__)
  static const bool wide = is_supported(InstructionSet::avx2);
  if (wide) return simd::xxh3_update_avx2(state, bytes.data(), bytes.size());
#endif
  XXH3_64bits_update(state, bytes.data(), bytes.size());
}

}  // namespace

uint64_t xxh3_64(std::span<const uint8_t> bytes) noexcept {
  if (bytes.size() < kStreamBytesMin) return XXH3_64bits(bytes.data(), bytes.size());
  Xxh3Stream stream;
  stream.update(bytes);
  return stream.digest();
}

Xxh3Stream::Xxh3Stream() noexcept {
  static_assert(sizeof(XXH3_state_t) <= kStateBytes && alignof(XXH3_state_t) <= alignof(Xxh3Stream));
  auto* state = ::new (static_cast<void*>(state_)) XXH3_state_t;
  XXH3_INITSTATE(state);
  XXH3_64bits_reset(state);
}

void Xxh3Stream::update(std::span<const uint8_t> bytes) noexcept { update_state(state_in(state_), bytes); }

uint64_t Xxh3Stream::digest() const noexcept { return XXH3_64bits_digest(state_in(state_)); }

}  // namespace zipmoe
