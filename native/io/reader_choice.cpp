#include "io/reader_choice.hpp"

#include <stdexcept>
#include <utility>

namespace zipmoe {

ChosenReader open_reader(const std::vector<std::string>& paths, const ReaderOptions& options) {
  if (options.backend == IoBackend::threads) {
    ThreadPoolReaderOptions threads = options.threads;
    threads.mode = options.mode;
    return {std::make_unique<ThreadPoolReader>(paths, threads), ""};
  }
  UringReaderOptions uring = options.uring;
  uring.mode = options.mode;
  auto reader = std::make_unique<UringReader>(paths, uring);
  std::string refusal = reader->registration_refusal();
  return {std::move(reader), std::move(refusal)};
}

IoBackend parse_io_backend(const std::string& text) {
  for (const IoBackend backend : {IoBackend::threads, IoBackend::uring}) {
    if (text == name(backend)) return backend;
  }
  throw std::invalid_argument("the I/O backend must be threads or uring, not " + text);
}

std::string name(IoBackend backend) { return backend == IoBackend::threads ? "threads" : "uring"; }

}  // namespace zipmoe
