#pragma once
#include "codec/planar.hpp"

namespace zipmoe {

// Shards are zstd frames with their content size. `level`: the library's scale (-131072..22). `huffman_only`: the most
// negative level, which finds no matches, with literal compression forced on: plain Huffman in an ordinary frame.
class ZstdCodec final : public PlanarCodec {
 public:
  std::string_view name() const override { return "zstd"; }
  std::string unavailable_reason() const override;

 protected:
  uint64_t compressed_bytes_max(uint64_t raw_bytes) const override;
  uint64_t compress_shard(std::span<const uint8_t> raw, const EncodeParameters& parameters,
                          std::span<uint8_t> out) const override;
  void validate_shard(std::span<const uint8_t> compressed, uint64_t raw_bytes) const override;
  void decompress_shard(std::span<const uint8_t> compressed, std::span<uint8_t> raw) const override;
};

}  // namespace zipmoe
