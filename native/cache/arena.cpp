#include "cache/arena.hpp"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <stdexcept>
#include <system_error>

namespace zipmoe {

Arena::Arena(uint64_t bytes) : bytes_(round_up(bytes + kReadableTailBytes, kHugePageBytes)), process_(::getpid()) {
  mapping_bytes_ = bytes_ + kHugePageBytes;
  mapping_ = ::mmap(nullptr, mapping_bytes_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapping_ == MAP_FAILED) {
    throw std::system_error(errno, std::generic_category(), "cannot reserve address space for the arena");
  }
  if (::madvise(mapping_, mapping_bytes_, MADV_DONTFORK) != 0) {
    const int error_number = errno;
    ::munmap(mapping_, mapping_bytes_);
    throw std::system_error(error_number, std::generic_category(), "cannot keep the arena out of child processes");
  }
  base_ = reinterpret_cast<uint8_t*>(round_up(reinterpret_cast<uintptr_t>(mapping_), kHugePageBytes));
}

Arena::~Arena() {
  if (::getpid() != process_) {
    // In a forked child something else may live at these addresses, and the threads are not there: their owner can
    // neither wait for them nor end without them.
    static_cast<void>(populator_.release());
    return;
  }
  stop_populating();
  ::munmap(mapping_, mapping_bytes_);
}

void Arena::commit(uint64_t offset, uint64_t length) {
  if (offset + length > bytes_ || offset + length < offset) throw std::out_of_range("range outside of the arena");
  // Whole huge pages, so that neighbouring regions do not split one, and a readable tail.
  const uint64_t begin = round_down(offset, kHugePageBytes);
  const uint64_t end = std::min(bytes_, round_up(offset + length + kReadableTailBytes, kHugePageBytes));
  if (::mprotect(base_ + begin, end - begin, PROT_READ | PROT_WRITE) != 0) {
    throw std::system_error(errno, std::generic_category(), "cannot allocate the arena");
  }
  // Advice: without huge pages everything works, somewhat slower.
  ::madvise(base_ + begin, end - begin, MADV_HUGEPAGE);
  if (populator_) populator_->add(begin, end);
}

void Arena::release(uint64_t offset, uint64_t length) noexcept {
  const uint64_t begin = round_up(offset, kHugePageBytes);
  const uint64_t end = std::min(bytes_, round_down(offset + length, kHugePageBytes));
  if (end <= begin) return;
  if (populator_) populator_->remove(begin, end);
  ::madvise(base_ + begin, end - begin, MADV_DONTNEED);
}

}  // namespace zipmoe
