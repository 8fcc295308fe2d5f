#include "io/completion_threads.hpp"

#include <utility>

namespace zipmoe {
namespace {

constexpr size_t kChunksPerThread = 64;

}  // namespace

CompletionThreads::CompletionThreads(uint32_t threads, Handler handler) : handler_(std::move(handler)) {
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

void CompletionThreads::add(ArrivedChunk arrived) {
  if (threads_.empty()) {
    handler_(arrived);
    return;
  }
  {
    std::unique_lock lock(mutex_);
    room_available_.wait(lock, [this] { return queue_.size() < kChunksPerThread * threads_.size(); });
    queue_.push_back(std::move(arrived));
  }
  work_available_.notify_one();
}

void CompletionThreads::serve() {
  for (;;) {
    std::unique_lock lock(mutex_);
    work_available_.wait(lock, [this] { return stopping_ || !queue_.empty(); });
    if (queue_.empty()) return;
    const ArrivedChunk arrived = std::move(queue_.front());
    queue_.pop_front();
    lock.unlock();
    room_available_.notify_one();
    handler_(arrived);
  }
}

}  // namespace zipmoe
