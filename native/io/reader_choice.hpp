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

enum class IoBackend : uint8_t { threads, uring };

struct ReaderOptions {
  IoBackend backend = IoBackend::threads;
  IoMode mode = IoMode::automatic;  // stands for that of both backends
  ThreadPoolReaderOptions threads = {};
  UringReaderOptions uring = {};
};

struct ChosenReader {
  std::unique_ptr<Reader> reader;
  std::string refusal;  // what of io_uring the kernel refused; reads are right without it
};

// Opens all files; throws FileOpenError, UringUnavailable.
ChosenReader open_reader(const std::vector<std::string>& paths, const ReaderOptions& options);

// "threads" or "uring"; throws std::invalid_argument.
IoBackend parse_io_backend(const std::string& text);
std::string name(IoBackend backend);

}  // namespace zipmoe
