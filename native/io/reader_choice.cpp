#include "io/reader_choice.hpp"

#include <stdexcept>
#include <utility>

namespace zipmoe {
namespace {

std::unique_ptr<Reader> open_threads(const std::vector<std::string>& paths, const ReaderOptions& options) {
  ThreadPoolReaderOptions threads = options.threads;
  threads.mode = options.mode;
  return std::make_unique<ThreadPoolReader>(paths, threads);
}

std::unique_ptr<Reader> open_uring(const std::vector<std::string>& paths, const ReaderOptions& options) {
  UringReaderOptions uring = options.uring;
  uring.mode = options.mode;
  return std::make_unique<UringReader>(paths, uring);
}

}  // namespace

ChosenReader open_reader(const std::vector<std::string>& paths, const ReaderOptions& options) {
  if (options.backend == IoBackend::threads) return {open_threads(paths, options), IoBackend::threads, ""};
  if (options.backend == IoBackend::uring) return {open_uring(paths, options), IoBackend::uring, ""};
  std::string reason;
  try {
    std::unique_ptr<Reader> reader = open_uring(paths, options);
    if (reader->mode() == "direct") return {std::move(reader), IoBackend::uring, ""};
    reason = "io_uring is for direct reads";
  } catch (const UringUnavailable& error) {
    reason = error.what();
  }
  return {open_threads(paths, options), IoBackend::threads, std::move(reason)};
}

IoBackend parse_io_backend(const std::string& text) {
  for (const IoBackend backend : {IoBackend::automatic, IoBackend::threads, IoBackend::uring}) {
    if (text == name(backend)) return backend;
  }
  throw std::invalid_argument("the I/O backend must be auto, threads or uring, not " + text);
}

std::string name(IoBackend backend) {
  switch (backend) {
    case IoBackend::automatic:
      return "auto";
    case IoBackend::threads:
      return "threads";
    case IoBackend::uring:
      break;
  }
  return "uring";
}

}  // namespace zipmoe
