#pragma once
#include <string>
#include <string_view>

namespace zipmoe {

// The library, with its version, that decodes a codec at run time, e.g. "zstd 1.5.7"; empty for codecs of our own and
// for unavailable ones.
std::string library_version(std::string_view codec);

}  // namespace zipmoe
