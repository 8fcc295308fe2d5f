#include "profiling/page_cache.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <system_error>

#include "io/source_file.hpp"

namespace zipmoe {
namespace {

// The page cache keeps files in folios of up to a huge page and drops whole ones only.
constexpr uint64_t kLargestFolioBytes = uint64_t{2} << 20;

class Descriptor {
 public:
  explicit Descriptor(const std::string& path) : number_(::open(path.c_str(), O_RDONLY | O_CLOEXEC)) {
    if (number_ < 0) throw FileOpenError(path, errno);
  }
  ~Descriptor() { ::close(number_); }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  int number() const { return number_; }

 private:
  const int number_;
};

}  // namespace

void drop_cached_pages(const std::string& path, const std::vector<std::pair<uint64_t, uint64_t>>& ranges) {
  const Descriptor file(path);
  for (const auto& [offset, length] : ranges) {
    const uint64_t begin = offset / kLargestFolioBytes * kLargestFolioBytes;
    const uint64_t end = (offset + length + kLargestFolioBytes - 1) / kLargestFolioBytes * kLargestFolioBytes;
    ::posix_fadvise(file.number(), static_cast<off_t>(begin), static_cast<off_t>(end - begin), POSIX_FADV_DONTNEED);
  }
}

uint64_t cached_bytes(const std::string& path, uint64_t offset, uint64_t length) {
  if (length == 0) return 0;
  const auto page = static_cast<uint64_t>(::sysconf(_SC_PAGESIZE));
  const uint64_t begin = offset / page * page;
  const uint64_t bytes = offset + length - begin;
  const Descriptor file(path);
  void* mapping = ::mmap(nullptr, bytes, PROT_READ, MAP_SHARED, file.number(), static_cast<off_t>(begin));
  if (mapping == MAP_FAILED) throw std::system_error(errno, std::generic_category(), "cannot map " + path);
  std::vector<unsigned char> resident((bytes + page - 1) / page);
  const int result = ::mincore(mapping, bytes, resident.data());
  const int error_number = errno;
  ::munmap(mapping, bytes);
  if (result != 0) throw std::system_error(error_number, std::generic_category(), "cannot look at pages of " + path);
  uint64_t cached = 0;
  for (unsigned char flags : resident) cached += (flags & 1U) != 0 ? page : 0;
  return cached < length ? cached : length;
}

}  // namespace zipmoe
