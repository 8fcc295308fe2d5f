#pragma once
#include "codec/planar.hpp"

namespace zipmoe {

// Shards are LZ4 blocks (no frame). Both codecs write the same format and differ in the encoder.
class Lz4BlockCodec : public PlanarCodec {
 public:
  std::string unavailable_reason() const final;

 protected:
  uint64_t compressed_bytes_max(uint64_t raw_bytes) const final;
  uint64_t compress_shard(std::span<const uint8_t> raw, const EncodeParameters& parameters,
                          std::span<uint8_t> out) const final;
  void validate_shard(std::span<const uint8_t> compressed, uint64_t raw_bytes) const final;
  void decompress_shard(std::span<const uint8_t> compressed, std::span<uint8_t> raw) const final;

 private:
  // Compresses `raw` to `out`, which is large enough, and returns the number of bytes.
  virtual int compress_block(std::span<const uint8_t> raw, int level, std::span<uint8_t> out) const = 0;
};

// The fast encoder; it has no levels.
class Lz4Codec final : public Lz4BlockCodec {
 public:
  std::string_view name() const override { return "lz4"; }

 private:
  int compress_block(std::span<const uint8_t> raw, int level, std::span<uint8_t> out) const override;
};

// The high-compression encoder, level 1..12.
class Lz4HighCompressionCodec final : public Lz4BlockCodec {
 public:
  std::string_view name() const override { return "lz4hc"; }

 private:
  int compress_block(std::span<const uint8_t> raw, int level, std::span<uint8_t> out) const override;
};

}  // namespace zipmoe
