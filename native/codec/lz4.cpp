#include "codec/lz4.hpp"

#ifdef ZIPMOE_HAVE_LZ4

#include <lz4.h>
#include <lz4hc.h>

namespace zipmoe {
namespace {

char* as_char(uint8_t* bytes) { return reinterpret_cast<char*>(bytes); }
const char* as_char(const uint8_t* bytes) { return reinterpret_cast<const char*>(bytes); }

}  // namespace

std::string Lz4BlockCodec::unavailable_reason() const { return {}; }

uint64_t Lz4BlockCodec::compressed_bytes_max(uint64_t raw_bytes) const {
  if (raw_bytes > LZ4_MAX_INPUT_SIZE) throw std::invalid_argument("LZ4 blocks end at 2 GB: use more shards");
  return static_cast<uint64_t>(LZ4_compressBound(static_cast<int>(raw_bytes)));
}

uint64_t Lz4BlockCodec::compress_shard(std::span<const uint8_t> raw, const EncodeParameters& parameters,
                                       std::span<uint8_t> out) const {
  const int bytes = compress_block(raw, parameters.level, out);
  if (bytes <= 0) throw std::runtime_error("LZ4: compression failed");
  return static_cast<uint64_t>(bytes);
}

void Lz4BlockCodec::validate_shard(std::span<const uint8_t> compressed, uint64_t raw_bytes) const {
  if (raw_bytes > LZ4_MAX_INPUT_SIZE) throw FormatError("LZ4: a shard exceeds 2 GB");
  // A byte of a block stands for at most 255 bytes; the library's bound limits the other side.
  if (compressed.size() > static_cast<size_t>(LZ4_compressBound(static_cast<int>(raw_bytes))) ||
      raw_bytes / 255 > compressed.size()) {
    throw FormatError("LZ4: " + std::to_string(compressed.size()) + " bytes cannot be a block of " +
                      std::to_string(raw_bytes) + " bytes");
  }
}

void Lz4BlockCodec::decompress_shard(std::span<const uint8_t> compressed, std::span<uint8_t> raw) const {
  validate_shard(compressed, raw.size());  // also makes both sizes fit into an int
  const int bytes = LZ4_decompress_safe(as_char(compressed.data()), as_char(raw.data()),
                                        static_cast<int>(compressed.size()), static_cast<int>(raw.size()));
  if (bytes < 0) throw FormatError("LZ4: cannot decompress: malformed block");
  if (static_cast<size_t>(bytes) != raw.size()) {
    throw FormatError("LZ4: a shard holds " + std::to_string(bytes) + " bytes instead of " +
                      std::to_string(raw.size()));
  }
}

int Lz4Codec::compress_block(std::span<const uint8_t> raw, int, std::span<uint8_t> out) const {
  return LZ4_compress_default(as_char(raw.data()), as_char(out.data()), static_cast<int>(raw.size()),
                              static_cast<int>(out.size()));
}

int Lz4HighCompressionCodec::compress_block(std::span<const uint8_t> raw, int level, std::span<uint8_t> out) const {
  if (level < 1 || level > LZ4HC_CLEVEL_MAX) {
    throw std::invalid_argument("lz4hc: level " + std::to_string(level) + " is not in 1.." +
                                std::to_string(LZ4HC_CLEVEL_MAX));
  }
  return LZ4_compress_HC(as_char(raw.data()), as_char(out.data()), static_cast<int>(raw.size()),
                         static_cast<int>(out.size()), level);
}

}  // namespace zipmoe

#else

namespace zipmoe {

std::string Lz4BlockCodec::unavailable_reason() const { return "built without the LZ4 library"; }

// PlanarCodec asks for the reason first, so none of these is ever entered.
uint64_t Lz4BlockCodec::compressed_bytes_max(uint64_t) const { throw UnknownCodec(unavailable_reason()); }

uint64_t Lz4BlockCodec::compress_shard(std::span<const uint8_t>, const EncodeParameters&, std::span<uint8_t>) const {
  throw UnknownCodec(unavailable_reason());
}

void Lz4BlockCodec::validate_shard(std::span<const uint8_t>, uint64_t) const {
  throw UnknownCodec(unavailable_reason());
}

void Lz4BlockCodec::decompress_shard(std::span<const uint8_t>, std::span<uint8_t>) const {
  throw UnknownCodec(unavailable_reason());
}

int Lz4Codec::compress_block(std::span<const uint8_t>, int, std::span<uint8_t>) const { return 0; }

int Lz4HighCompressionCodec::compress_block(std::span<const uint8_t>, int, std::span<uint8_t>) const { return 0; }

}  // namespace zipmoe

#endif
