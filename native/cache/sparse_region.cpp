#include "cache/sparse_region.hpp"

#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <system_error>

#include "cache/arena.hpp"

namespace zipmoe {

SparseRegion::SparseRegion(uint64_t bytes)
    : bytes_(round_up(bytes, kPageBytes) + kReadableTailBytes), process_(::getpid()) {
  void* mapping = ::mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapping == MAP_FAILED) {
    throw std::system_error(errno, std::generic_category(), "cannot reserve address space for rows on demand");
  }
  base_ = static_cast<uint8_t*>(mapping);
  if (::madvise(mapping, bytes_, MADV_DONTFORK) != 0) {
    const int error_number = errno;
    ::munmap(mapping, bytes_);
    throw std::system_error(error_number, std::generic_category(), "cannot keep rows on demand out of child processes");
  }
  // One row must not bring a huge page in. Kernels without huge pages refuse the advice and do not need it.
  ::madvise(mapping, bytes_, MADV_NOHUGEPAGE);
}

SparseRegion::~SparseRegion() {
  // In a forked child something else may live at these addresses.
  if (::getpid() == process_) ::munmap(base_, bytes_);
}

void SparseRegion::release(uint64_t offset, uint64_t length) noexcept {
  if (length > 0) ::madvise(base_ + offset, length, MADV_DONTNEED);
}

}  // namespace zipmoe
