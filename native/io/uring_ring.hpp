// One io_uring of the kernel, owned by one thread. Built without liburing it exists all the same and says that it is
// unavailable.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

namespace zipmoe {

// Why there is no io_uring: built without it, the kernel is too old, or somebody forbids it.
class UringUnavailable : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

struct UringCompletion {
  uint64_t token = 0;
  int32_t result = 0;  // bytes, or -errno
};

// To be used by the thread that made it, and by no other.
class UringRing {
 public:
  // Room for `entries` operations under way; throws UringUnavailable, also if the kernel accepts none.
  explicit UringRing(uint32_t entries);
  ~UringRing();  // nothing may be under way
  UringRing(const UringRing&) = delete;
  UringRing& operator=(const UringRing&) = delete;

  // Spare the kernel a look-up per read. Return why it refused, empty: it did not.
  std::string register_files(std::span<const int> descriptors);
  // The same for pages; regions that are registered stay in physical memory. Reads into other memory work as before.
  std::string register_memory(std::span<const std::span<uint8_t>> regions);
  // Afterwards the pages may be given back.
  void forget_memory() noexcept;

  // Reads at most 1 GiB from the file: its position in what was registered if it was, else its descriptor.
  void prepare_read(int file, uint64_t offset, uint64_t length, uint8_t* destination, uint64_t token) noexcept;
  // Reads the counter of an eventfd as soon as it is not zero.
  void prepare_wake(int descriptor, uint64_t* counter, uint64_t token) noexcept;
  // Hands what was prepared to the kernel and waits until something is complete; appends all that is.
  void submit_and_wait(std::vector<UringCompletion>& completions) noexcept;

 private:
  struct Implementation;
  std::unique_ptr<Implementation> implementation_;
};

// Why io_uring cannot be used by this process; empty if it can.
std::string uring_refusal();

}  // namespace zipmoe
