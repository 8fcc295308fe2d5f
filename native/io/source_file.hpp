// One file opened for reading: directly where the file system can, buffered otherwise.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

namespace zipmoe {

enum class IoMode : uint8_t { automatic, buffered };

class FileOpenError : public std::runtime_error {
 public:
  FileOpenError(const std::string& path, int error_number);
  int error_number() const { return error_number_; }

 private:
  int error_number_;
};

struct ReadOutcome {
  uint64_t bytes = 0;  // less than asked for: end of file
  int error_number = 0;
};

class SourceFile {
 public:
  // Opens the file and, in automatic mode, tries one direct read; throws FileOpenError.
  SourceFile(const std::string& path, IoMode mode);
  ~SourceFile();
  SourceFile(SourceFile&& other) noexcept;
  SourceFile(const SourceFile&) = delete;
  SourceFile& operator=(const SourceFile&) = delete;
  SourceFile& operator=(SourceFile&&) = delete;

  bool direct() const { return fallback_reason_.empty(); }
  const std::string& fallback_reason() const { return fallback_reason_; }

  // Reads `length` bytes at `offset`: continues after interrupts and short reads, stops at the end of the file.
  // Buffered reads leave nothing behind in the page cache. Thread-safe.
  ReadOutcome read(uint64_t offset, uint64_t length, uint8_t* destination) const noexcept;

 private:
  int descriptor_ = -1;
  std::string fallback_reason_;
};

}  // namespace zipmoe
