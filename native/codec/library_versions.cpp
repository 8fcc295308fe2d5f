#include "codec/library_versions.hpp"

#ifdef ZIPMOE_HAVE_ZSTD
#include <zstd.h>
#endif
#ifdef ZIPMOE_HAVE_LZ4
#include <lz4.h>
#endif

namespace zipmoe {

std::string library_version(std::string_view codec) {
#ifdef ZIPMOE_HAVE_ZSTD
  if (codec == "zstd") return std::string("zstd ") + ZSTD_versionString();
#endif
#ifdef ZIPMOE_HAVE_LZ4
  if (codec == "lz4" || codec == "lz4hc") return std::string("lz4 ") + LZ4_versionString();
#endif
  (void)codec;
  return {};
}

}  // namespace zipmoe
