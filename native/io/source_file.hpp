// One file opened for reading: directly where the file system can, buffered otherwise.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

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
  // Drops what a buffered read left in the page cache. `read` has done so.
  void drop_cached(uint64_t offset, uint64_t length) const noexcept;

  // For reads by other means; belongs to this object.
  int descriptor() const { return descriptor_; }

 private:
  int descriptor_ = -1;
  std::string fallback_reason_;
};

// The files of one reader.
class SourceFiles {
 public:
  // Opens all of them; throws FileOpenError.
  SourceFiles(const std::vector<std::string>& paths, IoMode mode);

  const SourceFile& operator[](size_t index) const { return files_[index]; }
  size_t size() const { return files_.size(); }
  // "direct", or "buffered" if one of them cannot be read directly.
  std::string mode() const { return fallback_reason().empty() ? "direct" : "buffered"; }
  // Why reads are not direct; empty if they are.
  std::string fallback_reason() const;

 private:
  std::vector<SourceFile> files_;
};

}  // namespace zipmoe
