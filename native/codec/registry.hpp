// All codecs that this program knows, available or not.
#pragma once
#include <span>
#include <string_view>

#include "codec/codec.hpp"

namespace zipmoe {

std::span<const Codec* const> all_codecs();

// Throws UnknownCodec when there is no codec of this name. The codec may be unavailable: see unavailable_reason().
const Codec& find_codec(std::string_view name);

}  // namespace zipmoe
