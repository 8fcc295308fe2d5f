#include "cache/memory_populator.hpp"

#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <stdexcept>
#include <system_error>

#include "cache/arena.hpp"

namespace zipmoe {
namespace {

constexpr int kLowestPriority = 19;
constexpr uint64_t kSmallestPageBytes = 4096;
// What is claimed next, where claims have caught up: left to who claims it, so that he does not wait page by page.
constexpr uint64_t kPagesLeftToClaims = 32;

}  // namespace

MemoryPopulator::MemoryPopulator(uint8_t* base, uint64_t bytes, uint32_t threads)
    : base_(base), thread_count_(threads), pages_(bytes / kHugePageBytes, Page::absent) {
  if (threads == 0) throw std::invalid_argument("populating memory needs at least one thread");
  threads_.reserve(threads);
}

void MemoryPopulator::begin() {
  try {
    while (threads_.size() < thread_count_) threads_.emplace_back([this] { serve(); });
  } catch (const std::system_error&) {
    // There is a limit of threads. Those that are there do the work; without any, whoever uses the memory brings it in.
  }
}

MemoryPopulator::~MemoryPopulator() {
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  work_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

void MemoryPopulator::add(uint64_t begin, uint64_t end) {
  {
    std::lock_guard lock(mutex_);
    const uint64_t first = begin / kHugePageBytes;
    const uint64_t last = std::min<uint64_t>(pages_.size(), round_up(end, kHugePageBytes) / kHugePageBytes);
    for (uint64_t page = first; page < last; ++page) {
      if (pages_[page] == Page::absent) pages_[page] = Page::wanted;
    }
    next_ = std::min(next_, first);
  }
  work_.notify_all();
}

void MemoryPopulator::settle(uint64_t begin, uint64_t end, Page state) noexcept {
  std::unique_lock lock(mutex_);
  const uint64_t last = std::min<uint64_t>(pages_.size(), round_up(end, kHugePageBytes) / kHugePageBytes);
  bool caught_up = false;
  for (uint64_t page = begin / kHugePageBytes; page < last; ++page) {
    caught_up = caught_up || pages_[page] == Page::at_hand || pages_[page] == Page::wanted;
    if (pages_[page] == Page::at_hand) next_ = std::max(next_, last + kPagesLeftToClaims);
    page_done_.wait(lock, [&] { return pages_[page] != Page::at_hand; });
    pages_[page] = state;
  }
  if (caught_up) next_ = std::max(next_, last + kPagesLeftToClaims);
  page_done_.notify_all();  // the last page that was wanted may be among them
}

void MemoryPopulator::finish() {
  std::unique_lock lock(mutex_);
  page_done_.wait(lock, [this] { return threads_.empty() || (at_hand_ == 0 && !advance_to_wanted()); });
}

bool MemoryPopulator::advance_to_wanted() {
  const auto from = pages_.begin() + static_cast<std::ptrdiff_t>(std::min<uint64_t>(next_, pages_.size()));
  auto found = std::find(from, pages_.end(), Page::wanted);
  if (found == pages_.end()) found = std::find(pages_.begin(), pages_.end(), Page::wanted);  // what was left to claims
  if (found == pages_.end()) return false;
  next_ = static_cast<uint64_t>(found - pages_.begin());
  return true;
}

void MemoryPopulator::serve() {
  ::setpriority(PRIO_PROCESS, static_cast<id_t>(::gettid()), kLowestPriority);  // of this thread, on Linux
  std::unique_lock lock(mutex_);
  for (;;) {
    work_.wait(lock, [this] { return stopping_ || advance_to_wanted(); });
    if (stopping_) return;
    const uint64_t page = next_;
    pages_[page] = Page::at_hand;
    ++at_hand_;
    lock.unlock();
    touch(page);
    lock.lock();
    pages_[page] = Page::settled;
    --at_hand_;
    page_done_.notify_all();
  }
}

// By page faults, not by madvise(MADV_POPULATE_WRITE): that holds the lock of the whole address space meanwhile, and
// every allocation of other threads would wait some milliseconds for it.
void MemoryPopulator::touch(uint64_t page) const noexcept {
  volatile uint8_t* const begin = base_ + page * kHugePageBytes;
  for (uint64_t offset = 0; offset < kHugePageBytes; offset += kSmallestPageBytes) begin[offset] = 0;
}

}  // namespace zipmoe
