#include "io/source_file.hpp"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <memory>
#include <system_error>
#include <utility>

#include "io/reader.hpp"

namespace zipmoe {
namespace {

// Linux transfers at most 2 GiB less a page per call.
constexpr uint64_t kLargestTransferBytes = uint64_t{1} << 30;
// The page cache keeps files in folios of up to a huge page.
constexpr uint64_t kLargestFolioBytes = uint64_t{2} << 20;

// std::strerror is not thread-safe.
std::string error_text(int error_number) { return std::generic_category().message(error_number); }

int open_retrying(const std::string& path, int flags) {
  int descriptor;
  do {
    descriptor = ::open(path.c_str(), flags | O_RDONLY | O_CLOEXEC);
  } while (descriptor < 0 && errno == EINTR);
  return descriptor;
}

// Some file systems accept the flag and refuse the read, so one is tried. Returns errno, 0 = works.
int probe_direct_read(int descriptor) {
  struct Free {
    void operator()(void* memory) const { std::free(memory); }
  };
  std::unique_ptr<void, Free> page(std::aligned_alloc(kReadAlignmentBytes, kReadAlignmentBytes));
  if (!page) return ENOMEM;
  ssize_t count;
  do {
    count = ::pread(descriptor, page.get(), kReadAlignmentBytes, 0);
  } while (count < 0 && errno == EINTR);
  return count < 0 ? errno : 0;
}

}  // namespace

FileOpenError::FileOpenError(const std::string& path, int error_number)
    : std::runtime_error("cannot open " + path + ": " + error_text(error_number)), error_number_(error_number) {}

SourceFile::SourceFile(const std::string& path, IoMode mode) {
  if (mode == IoMode::buffered) {
    fallback_reason_ = "buffered reads were asked for";
  } else {
    descriptor_ = open_retrying(path, O_DIRECT);
    const int error_number = descriptor_ < 0 ? errno : probe_direct_read(descriptor_);
    if (error_number == 0) return;
    if (descriptor_ >= 0) ::close(descriptor_);
    fallback_reason_ = "the file system refuses direct I/O: " + error_text(error_number);
  }
  descriptor_ = open_retrying(path, 0);
  if (descriptor_ < 0) throw FileOpenError(path, errno);
  // Read-ahead would bring in pages beyond the record, which nobody would drop again.
  ::posix_fadvise(descriptor_, 0, 0, POSIX_FADV_RANDOM);
}

SourceFile::SourceFile(SourceFile&& other) noexcept
    : descriptor_(std::exchange(other.descriptor_, -1)), fallback_reason_(std::move(other.fallback_reason_)) {}

SourceFile::~SourceFile() {
  if (descriptor_ >= 0) ::close(descriptor_);
}

ReadOutcome SourceFile::read(uint64_t offset, uint64_t length, uint8_t* destination) const noexcept {
  ReadOutcome outcome;
  uint64_t furthest = 0;
  while (outcome.bytes < length) {
    const uint64_t wanted = std::min(length - outcome.bytes, kLargestTransferBytes);
    const ssize_t count =
        ::pread(descriptor_, destination + outcome.bytes, wanted, static_cast<off_t>(offset + outcome.bytes));
    if (count < 0) {
      if (errno == EINTR) continue;
      outcome.error_number = errno;
      break;
    }
    const uint64_t reached = outcome.bytes + static_cast<uint64_t>(count);
    if (reached >= length) {
      outcome.bytes = length;
      break;
    }
    if (reached <= furthest) {  // no byte more than last time: the end of the file
      outcome.bytes = reached;
      break;
    }
    furthest = reached;
    // A direct read must go on at an aligned position, so the partial page is read again.
    outcome.bytes = direct() ? reached / kReadAlignmentBytes * kReadAlignmentBytes : reached;
  }
  if (!direct()) drop_cached(offset, length);
  return outcome;
}

void SourceFile::drop_cached(uint64_t offset, uint64_t length) const noexcept {
  // Only whole folios are dropped, and those of large reads reach beyond the record.
  const uint64_t begin = offset / kLargestFolioBytes * kLargestFolioBytes;
  const uint64_t end = (offset + length + kLargestFolioBytes - 1) / kLargestFolioBytes * kLargestFolioBytes;
  ::posix_fadvise(descriptor_, static_cast<off_t>(begin), static_cast<off_t>(end - begin), POSIX_FADV_DONTNEED);
}

SourceFiles::SourceFiles(const std::vector<std::string>& paths, IoMode mode) {
  files_.reserve(paths.size());
  for (const std::string& path : paths) files_.emplace_back(path, mode);
}

std::string SourceFiles::fallback_reason() const {
  for (const SourceFile& file : files_) {
    if (!file.direct()) return file.fallback_reason();
  }
  return {};
}

}  // namespace zipmoe
