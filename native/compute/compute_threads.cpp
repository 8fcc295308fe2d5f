#include "compute/compute_threads.hpp"

#include <exception>
#include <stdexcept>
#include <utility>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace zipmoe {
namespace {

using Clock = std::chrono::steady_clock;

void pause() noexcept {
#if defined(__x86_64__)
  _mm_pause();
#else
  std::this_thread::yield();
#endif
}

// Looks at `done` until it is true or the time is over.
template <typename Condition>
bool spin_until(std::chrono::microseconds limit, const Condition& done) {
  constexpr int looks_per_clock = 32;  // reading the clock takes as long as a few pauses
  const Clock::time_point end = Clock::now() + limit;
  do {
    for (int i = 0; i < looks_per_clock; ++i) {
      if (done()) return true;
      pause();
    }
  } while (Clock::now() < end);
  return done();
}

uint64_t packed(uint64_t begin, uint64_t end) { return begin << 32 | end; }
uint32_t begin_of(uint64_t bounds) { return static_cast<uint32_t>(bounds >> 32); }
uint32_t end_of(uint64_t bounds) { return static_cast<uint32_t>(bounds); }

// Results must not depend on what a thread's owner has set (flushed denormals, say) nor on which thread runs a task.
class DefaultFloatingPoint {
 public:
#if defined(__x86_64__)
  DefaultFloatingPoint() noexcept : saved_(_mm_getcsr()) { _mm_setcsr(0x1F80); }
  ~DefaultFloatingPoint() { _mm_setcsr(saved_); }
#else
  DefaultFloatingPoint() noexcept = default;
#endif
  DefaultFloatingPoint(const DefaultFloatingPoint&) = delete;
  DefaultFloatingPoint& operator=(const DefaultFloatingPoint&) = delete;

 private:
#if defined(__x86_64__)
  unsigned saved_;
#endif
};

}  // namespace

ComputeThreads::ComputeThreads(uint32_t threads, std::chrono::microseconds spin) : spin_(spin), ranges_(threads) {
  if (threads == 0) throw std::invalid_argument("computing needs at least one thread");
  if (spin.count() < 0) throw std::invalid_argument("the time to wait actively must not be negative");
  workers_.reserve(threads - 1);
  for (uint32_t i = 1; i < threads; ++i) workers_.emplace_back([this, i] { serve(i); });
}

ComputeThreads::~ComputeThreads() {
  stopping_ = true;
  ++step_;
  step_.notify_all();
  for (std::thread& worker : workers_) worker.join();
}

void ComputeThreads::run(uint32_t tasks, const std::function<void(uint32_t)>& body) {
  if (tasks == 0) return;
  std::lock_guard step(step_mutex_);
  body_ = &body;
  unfinished_.store(tasks, std::memory_order_relaxed);
  for (uint64_t thread = 0; thread < ranges_.size(); ++thread) {
    const uint64_t begin = tasks * thread / ranges_.size();
    const uint64_t end = tasks * (thread + 1) / ranges_.size();
    ranges_[thread].bounds.store(packed(begin, end), std::memory_order_release);
  }
  if (tasks > 1 && !workers_.empty()) {
    step_.fetch_add(1, std::memory_order_release);
    step_.notify_all();
  }
  while (take_task(0)) {
  }
  wait_for_end();
  if (auto failure = std::exchange(failure_, std::nullopt)) throw std::runtime_error(*failure);
}

void ComputeThreads::serve(uint32_t thread) {
  uint32_t seen = 0;
  for (;;) {
    const auto called = [&] { return step_.load(std::memory_order_acquire) != seen; };
    if (!spin_until(spin_, called)) step_.wait(seen, std::memory_order_acquire);
    if (stopping_) return;
    seen = step_.load(std::memory_order_acquire);
    while (take_task(thread)) {
    }
  }
}

std::optional<uint32_t> ComputeThreads::take_first(Range& range) {
  uint64_t bounds = range.bounds.load(std::memory_order_relaxed);
  do {
    if (begin_of(bounds) == end_of(bounds)) return std::nullopt;
  } while (!range.bounds.compare_exchange_weak(bounds, packed(begin_of(bounds) + 1, end_of(bounds)),
                                               std::memory_order_acquire, std::memory_order_relaxed));
  return begin_of(bounds);
}

std::optional<uint32_t> ComputeThreads::take_last(Range& range) {
  uint64_t bounds = range.bounds.load(std::memory_order_relaxed);
  do {
    if (begin_of(bounds) == end_of(bounds)) return std::nullopt;
  } while (!range.bounds.compare_exchange_weak(bounds, packed(begin_of(bounds), end_of(bounds) - 1),
                                               std::memory_order_acquire, std::memory_order_relaxed));
  return end_of(bounds) - 1;
}

bool ComputeThreads::take_task(uint32_t thread) {
  std::optional<uint32_t> task = take_first(ranges_[thread]);
  while (!task) {
    Range* longest = nullptr;
    uint32_t most = 0;
    for (Range& range : ranges_) {
      const uint64_t bounds = range.bounds.load(std::memory_order_relaxed);
      if (end_of(bounds) - begin_of(bounds) > most) {
        most = end_of(bounds) - begin_of(bounds);
        longest = &range;
      }
    }
    if (longest == nullptr) return false;
    task = take_last(*longest);
  }
  run_task(*task);
  return true;
}

void ComputeThreads::run_task(uint32_t task) noexcept {
  try {
    const DefaultFloatingPoint environment;
    (*body_)(task);
  } catch (const std::exception& error) {
    std::lock_guard lock(failure_mutex_);
    if (!failure_) failure_ = error.what();
  }
  if (unfinished_.fetch_sub(1, std::memory_order_acq_rel) == 1) unfinished_.notify_all();
}

void ComputeThreads::wait_for_end() {
  const auto ended = [&] { return unfinished_.load(std::memory_order_acquire) == 0; };
  if (spin_until(spin_, ended)) return;
  for (uint32_t left; (left = unfinished_.load(std::memory_order_acquire)) != 0;) {
    unfinished_.wait(left, std::memory_order_acquire);
  }
}

}  // namespace zipmoe
