// What the page cache holds of a file, and dropping it, so that buffered reads are measured on the disk.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace zipmoe {

// Asks the kernel to drop the pages of [offset, offset + length), rounded out to whole folios, for each range of the
// file. Pages that are mapped or dirty stay. Throws FileOpenError.
void drop_cached_pages(const std::string& path, const std::vector<std::pair<uint64_t, uint64_t>>& ranges);

// Bytes of [offset, offset + length) that lie in the page cache. The kernel tells only the owner of the file or who may
// write it; to others everything seems cached. Throws FileOpenError, std::system_error.
uint64_t cached_bytes(const std::string& path, uint64_t offset, uint64_t length);

}  // namespace zipmoe
