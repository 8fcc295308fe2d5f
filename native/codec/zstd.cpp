#include "codec/zstd.hpp"

#ifdef ZIPMOE_HAVE_ZSTD

#include <memory>

#define ZSTD_STATIC_LINKING_ONLY  // for ZSTD_c_literalCompressionMode
#include <zstd.h>

namespace zipmoe {
namespace {

struct FreeCompressor {
  void operator()(ZSTD_CCtx* context) const { ZSTD_freeCCtx(context); }
};

struct FreeDecompressor {
  void operator()(ZSTD_DCtx* context) const { ZSTD_freeDCtx(context); }
};

size_t checked(size_t result, const char* what) {
  if (!ZSTD_isError(result)) return result;
  throw std::runtime_error(std::string("zstd: ") + what + ": " + ZSTD_getErrorName(result));
}

void set(ZSTD_CCtx* context, ZSTD_cParameter parameter, int value) {
  checked(ZSTD_CCtx_setParameter(context, parameter, value), "cannot set a parameter");
}

// One per thread and kept: it is some 160 KiB, which would be allocated and cleared anew for every shard.
ZSTD_DCtx* thread_decompressor() {
  thread_local const std::unique_ptr<ZSTD_DCtx, FreeDecompressor> context(ZSTD_createDCtx());
  if (!context) throw std::bad_alloc();
  return context.get();
}

}  // namespace

std::string ZstdCodec::unavailable_reason() const { return {}; }

uint64_t ZstdCodec::compressed_bytes_max(uint64_t raw_bytes) const { return ZSTD_compressBound(raw_bytes); }

uint64_t ZstdCodec::compress_shard(std::span<const uint8_t> raw, const EncodeParameters& parameters,
                                   std::span<uint8_t> out) const {
  if (parameters.level < ZSTD_minCLevel() || parameters.level > ZSTD_maxCLevel()) {
    throw std::invalid_argument("zstd: level " + std::to_string(parameters.level) + " is not in " +
                                std::to_string(ZSTD_minCLevel()) + ".." + std::to_string(ZSTD_maxCLevel()));
  }
  const std::unique_ptr<ZSTD_CCtx, FreeCompressor> context(ZSTD_createCCtx());
  if (!context) throw std::bad_alloc();
  set(context.get(), ZSTD_c_compressionLevel, parameters.huffman_only ? ZSTD_minCLevel() : parameters.level);
  if (parameters.huffman_only) {
    // The header calls the value ZSTD_lcm_huffman in old releases and ZSTD_ps_enable in newer ones.
    set(context.get(), ZSTD_c_literalCompressionMode, 1);
  }
  return checked(ZSTD_compress2(context.get(), out.data(), out.size(), raw.data(), raw.size()), "compression failed");
}

void ZstdCodec::validate_shard(std::span<const uint8_t> compressed, uint64_t raw_bytes) const {
  const unsigned long long content = ZSTD_getFrameContentSize(compressed.data(), compressed.size());
  if (content == ZSTD_CONTENTSIZE_ERROR) throw FormatError("zstd: a shard is not a zstd frame");
  if (content == ZSTD_CONTENTSIZE_UNKNOWN) throw FormatError("zstd: a shard does not state its size");
  if (content != raw_bytes) {
    throw FormatError("zstd: a shard holds " + std::to_string(content) + " bytes instead of " +
                      std::to_string(raw_bytes));
  }
  const size_t frame = ZSTD_findFrameCompressedSize(compressed.data(), compressed.size());
  if (ZSTD_isError(frame) || frame != compressed.size()) {
    throw FormatError("zstd: a shard is not exactly one frame");
  }
}

void ZstdCodec::decompress_shard(std::span<const uint8_t> compressed, std::span<uint8_t> raw) const {
  const size_t bytes =
      ZSTD_decompressDCtx(thread_decompressor(), raw.data(), raw.size(), compressed.data(), compressed.size());
  if (ZSTD_isError(bytes)) throw FormatError(std::string("zstd: cannot decompress: ") + ZSTD_getErrorName(bytes));
  if (bytes != raw.size()) {
    throw FormatError("zstd: a shard holds " + std::to_string(bytes) + " bytes instead of " +
                      std::to_string(raw.size()));
  }
}

}  // namespace zipmoe

#else

namespace zipmoe {

std::string ZstdCodec::unavailable_reason() const { return "built without the zstd library"; }

// PlanarCodec asks for the reason first, so none of these is ever entered.
uint64_t ZstdCodec::compressed_bytes_max(uint64_t) const { throw UnknownCodec(unavailable_reason()); }

uint64_t ZstdCodec::compress_shard(std::span<const uint8_t>, const EncodeParameters&, std::span<uint8_t>) const {
  throw UnknownCodec(unavailable_reason());
}

void ZstdCodec::validate_shard(std::span<const uint8_t>, uint64_t) const { throw UnknownCodec(unavailable_reason()); }

void ZstdCodec::decompress_shard(std::span<const uint8_t>, std::span<uint8_t>) const {
  throw UnknownCodec(unavailable_reason());
}

}  // namespace zipmoe

#endif
