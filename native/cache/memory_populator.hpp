// Brings fresh memory in before anybody needs it: the first touch of a page costs more than reading its content from
// disk, above all in virtual machines, where the host has to find the memory first. Threads of the lowest priority
// touch huge page after huge page, so that they use what is left of the processors while a model loads.
//
// They write. So memory that somebody is about to use is claimed first; from then on no thread touches it.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

namespace zipmoe {

// Ranges are bytes from the base; every huge page that they meet belongs to them.
class MemoryPopulator {
 public:
  // Nothing is touched before it is added, and before begin(). `base`: at a huge page; outlives this.
  MemoryPopulator(uint8_t* base, uint64_t bytes, uint32_t threads);
  // Waits for the pages at hand.
  ~MemoryPopulator();
  MemoryPopulator(const MemoryPopulator&) = delete;
  MemoryPopulator& operator=(const MemoryPopulator&) = delete;

  // Starts the threads, as many of them as the system allows; idempotent.
  void begin();
  // The range is writable and not in use, but for what has been claimed: to be touched, lowest pages first.
  void add(uint64_t begin, uint64_t end);
  // Somebody will use the range: waits for pages at hand.
  void claim(uint64_t begin, uint64_t end) noexcept { settle(begin, end, Page::settled); }
  // The range is given back to the system: the same, until it is added again.
  void remove(uint64_t begin, uint64_t end) noexcept { settle(begin, end, Page::absent); }
  // Waits until everything that was added has been touched or claimed; not at all where no thread could be started.
  // After begin().
  void finish();

 private:
  enum class Page : uint8_t { absent, wanted, at_hand, settled };

  void serve();
  void touch(uint64_t page) const noexcept;
  bool advance_to_wanted();
  void settle(uint64_t begin, uint64_t end, Page state) noexcept;

  uint8_t* const base_;
  const uint32_t thread_count_;
  std::mutex mutex_;
  std::condition_variable work_;
  std::condition_variable page_done_;
  std::vector<Page> pages_;
  uint64_t next_ = 0;     // where to look first
  uint32_t at_hand_ = 0;  // pages
  bool stopping_ = false;
  std::vector<std::thread> threads_;  // last: they use the rest
};

}  // namespace zipmoe
