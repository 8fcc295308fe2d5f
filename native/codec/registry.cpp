#include "codec/registry.hpp"

#include <array>
#include <string>

#include "codec/fx3.hpp"
#include "codec/lz4.hpp"
#include "codec/zstd.hpp"

namespace zipmoe {

// A new codec is one file and one entry here (docs/adding_a_codec.md). The list is written out because objects that
// register themselves are dropped by the linker when nothing else refers to their file in a static library.
std::span<const Codec* const> all_codecs() {
  static const Fx3Codec fx3;
  static const ZstdCodec zstd;
  static const Lz4Codec lz4;
  static const Lz4HighCompressionCodec lz4hc;
  static const std::array<const Codec*, 4> codecs = {&fx3, &zstd, &lz4, &lz4hc};
  return codecs;
}

const Codec& find_codec(std::string_view name) {
  std::string known;
  for (const Codec* codec : all_codecs()) {
    if (codec->name() == name) return *codec;
    known += (known.empty() ? "" : ", ") + std::string(codec->name());
  }
  throw UnknownCodec("unknown codec '" + std::string(name) + "' (known: " + known + ")");
}

}  // namespace zipmoe
