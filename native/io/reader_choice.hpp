// Which backend carries the reads out.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "io/reader.hpp"
#include "io/thread_pool_reader.hpp"
#include "io/uring_reader.hpp"

namespace zipmoe {

enum class IoBackend : uint8_t { automatic, threads, uring };

struct ReaderOptions {
  IoBackend backend = IoBackend::automatic;
  IoMode mode = IoMode::automatic;  // stands for that of both backends
  ThreadPoolReaderOptions threads = {};
  UringReaderOptions uring = {};
};

struct ChosenReader {
  std::unique_ptr<Reader> reader;
  IoBackend backend = IoBackend::threads;  // never automatic
  std::string reason;                      // why it is not the other one, if nobody asked for it
};

// Opens all files; throws FileOpenError, and UringUnavailable if nothing but io_uring was asked for.
ChosenReader open_reader(const std::vector<std::string>& paths, const ReaderOptions& options);

// "auto", "threads" or "uring"; throws std::invalid_argument.
IoBackend parse_io_backend(const std::string& text);
std::string name(IoBackend backend);

}  // namespace zipmoe
