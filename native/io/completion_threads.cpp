#include "io/completion_threads.hpp"

namespace zipmoe {
namespace {

constexpr size_t kReadsPerThread = 16;

}  // namespace

CompletionThreads::CompletionThreads(uint32_t threads) {
  threads_.reserve(threads);
  for (uint32_t i = 0; i < threads; ++i) threads_.emplace_back([this] { serve(); });
}

CompletionThreads::~CompletionThreads() {
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  work_available_.notify_all();
  threads_.clear();
}

void CompletionThreads::add(const FinishedRead& finished) {
  if (threads_.empty()) {
    finished.tell_sink();
    return;
  }
  {
    std::unique_lock lock(mutex_);
    room_available_.wait(lock, [this] { return queue_.size() < kReadsPerThread * threads_.size(); });
    queue_.push_back(finished);
  }
  work_available_.notify_one();
}

void CompletionThreads::serve() {
  for (;;) {
    std::unique_lock lock(mutex_);
    work_available_.wait(lock, [this] { return stopping_ || !queue_.empty(); });
    if (queue_.empty()) return;
    const FinishedRead finished = queue_.front();
    queue_.pop_front();
    lock.unlock();
    room_available_.notify_one();
    finished.tell_sink();
  }
}

}  // namespace zipmoe
