#include "io/thread_pool_reader.hpp"

#include <cerrno>
#include <chrono>
#include <stdexcept>

namespace zipmoe {

ThreadPoolReader::ThreadPoolReader(const std::vector<std::string>& paths, const ThreadPoolReaderOptions& options)
    : files_(paths, options.mode),
      queue_(static_cast<uint32_t>(paths.size()), options.chunk_bytes, options.queue_capacity,
             options.least_chunk_bytes) {
  if (options.threads == 0) throw std::invalid_argument("the reader needs at least one thread");
  threads_.reserve(options.threads);
  for (uint32_t i = 0; i < options.threads; ++i) threads_.emplace_back([this] { serve(); });
}

ThreadPoolReader::~ThreadPoolReader() {
  queue_.stop();
  for (std::thread& thread : threads_) thread.join();
}

void ThreadPoolReader::serve() {
  while (const std::optional<ReadChunk> chunk = queue_.take()) {
    ReadOutcome outcome;
    if (chunk->skip()) {
      outcome.error_number = ECANCELED;
    } else {
      outcome = files_[chunk->job().file].read(chunk->file_offset(), chunk->length(), chunk->destination());
    }
    const auto arrived = std::chrono::steady_clock::now();
    chunk->tell_sink(outcome);
    if (const std::optional<FinishedRead> finished = queue_.finish(*chunk, outcome, arrived)) finished->tell_sink();
  }
}

}  // namespace zipmoe
