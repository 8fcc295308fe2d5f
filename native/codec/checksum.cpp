#include "codec/checksum.hpp"

#define XXH_INLINE_ALL
#include <xxhash.h>

namespace zipmoe {

uint64_t xxh3_64(std::span<const uint8_t> bytes) noexcept { return XXH3_64bits(bytes.data(), bytes.size()); }

}  // namespace zipmoe
