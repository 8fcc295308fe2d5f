#include "io/uring_ring.hpp"

#ifdef ZIPMOE_HAVE_URING

#include <liburing.h>
#include <sys/uio.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <system_error>
#include <thread>

namespace zipmoe {
namespace {

// The kernel's limit of one registered buffer.
constexpr uint64_t kLargestBufferBytes = uint64_t{1} << 30;

std::string refusal_text(int error_number) {
  switch (error_number) {
    case ENOSYS:
      return "the kernel has no io_uring";
    case EPERM:
    case EACCES:
      return "io_uring is forbidden here (kernel.io_uring_disabled, or a container's rules)";
    case ENOMEM:
      return "not enough memory may be locked for io_uring (ulimit -l)";
    default:
      return "io_uring does not start: " + std::generic_category().message(error_number);
  }
}

// Completions are delivered when this thread asks for them instead of interrupting it; older kernels do not know how.
int start(io_uring& ring, uint32_t entries) {
  int error = -EINVAL;
#if defined(IORING_SETUP_SINGLE_ISSUER) && defined(IORING_SETUP_DEFER_TASKRUN)
  error = io_uring_queue_init(entries, &ring, IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_DEFER_TASKRUN);
#endif
  if (error == -EINVAL) error = io_uring_queue_init(entries, &ring, 0);
  return -error;
}

// A container may let a ring be made and not be used, so an operation is tried.
int try_operation(io_uring& ring) {
  io_uring_prep_nop(io_uring_get_sqe(&ring));
  int submitted;
  do {
    submitted = io_uring_submit_and_wait(&ring, 1);
  } while (submitted == -EINTR);
  if (submitted < 0) return -submitted;
  io_uring_cqe* completion = nullptr;
  const int error = io_uring_wait_cqe(&ring, &completion);
  if (error != 0) return -error;
  const int result = completion->res;
  io_uring_cqe_seen(&ring, completion);
  return result < 0 ? -result : 0;
}

bool can_read(io_uring& ring) {
  struct Free {
    void operator()(io_uring_probe* probe) const { io_uring_free_probe(probe); }
  };
  const std::unique_ptr<io_uring_probe, Free> probe(io_uring_get_probe_ring(&ring));
  return probe && io_uring_opcode_supported(probe.get(), IORING_OP_READ) != 0 &&
         io_uring_opcode_supported(probe.get(), IORING_OP_READ_FIXED) != 0;
}

}  // namespace

struct UringRing::Implementation {
  io_uring ring{};
  bool registered_files = false;
  std::vector<iovec> buffers;  // registered

  ~Implementation() { io_uring_queue_exit(&ring); }

  // The registered buffer that holds the whole range, or -1.
  int buffer_of(const uint8_t* begin, uint64_t length) const {
    for (size_t i = 0; i < buffers.size(); ++i) {
      const auto* base = static_cast<const uint8_t*>(buffers[i].iov_base);
      if (begin >= base && begin + length <= base + buffers[i].iov_len) return static_cast<int>(i);
    }
    return -1;
  }
};

UringRing::UringRing(uint32_t entries) {
  io_uring ring{};
  if (const int error_number = start(ring, entries)) throw UringUnavailable(refusal_text(error_number));
  implementation_ = std::make_unique<Implementation>();
  implementation_->ring = ring;
  if (!can_read(implementation_->ring))
    throw UringUnavailable("the kernel's io_uring is too old: it has no plain read");
  if (const int error_number = try_operation(implementation_->ring)) throw UringUnavailable(refusal_text(error_number));
}

UringRing::~UringRing() {
  if (implementation_) forget_memory();  // at once; what is left to the ring's end comes later
}

std::string UringRing::register_files(std::span<const int> descriptors) {
  const int error =
      io_uring_register_files(&implementation_->ring, descriptors.data(), static_cast<unsigned>(descriptors.size()));
  implementation_->registered_files = error == 0;
  return error == 0 ? "" : std::generic_category().message(-error);
}

std::string UringRing::register_memory(std::span<const std::span<uint8_t>> regions) {
  forget_memory();
  std::vector<iovec> buffers;
  for (const std::span<uint8_t> region : regions) {
    for (uint64_t begin = 0; begin < region.size(); begin += kLargestBufferBytes) {
      buffers.push_back({region.data() + begin, std::min(kLargestBufferBytes, region.size() - begin)});
    }
  }
  if (buffers.empty()) return "";
  const int error =
      io_uring_register_buffers(&implementation_->ring, buffers.data(), static_cast<unsigned>(buffers.size()));
  if (error == 0) implementation_->buffers = std::move(buffers);
  return error == 0 ? "" : std::generic_category().message(-error);
}

void UringRing::forget_memory() noexcept {
  if (implementation_->buffers.empty()) return;
  implementation_->buffers.clear();
  io_uring_unregister_buffers(&implementation_->ring);
}

void UringRing::prepare_read(int file, uint64_t offset, uint64_t length, uint8_t* destination,
                             uint64_t token) noexcept {
  io_uring_sqe* entry = io_uring_get_sqe(&implementation_->ring);  // there is one per operation under way
  const int buffer = implementation_->buffer_of(destination, length);
  const auto bytes = static_cast<unsigned>(length);
  if (buffer >= 0) {
    io_uring_prep_read_fixed(entry, file, destination, bytes, offset, buffer);
  } else {
    io_uring_prep_read(entry, file, destination, bytes, offset);
  }
  if (implementation_->registered_files) entry->flags |= IOSQE_FIXED_FILE;
  entry->user_data = token;
}

void UringRing::prepare_wake(int descriptor, uint64_t* counter, uint64_t token) noexcept {
  io_uring_sqe* entry = io_uring_get_sqe(&implementation_->ring);
  io_uring_prep_read(entry, descriptor, counter, sizeof *counter, 0);
  entry->user_data = token;
}

void UringRing::submit_and_wait(std::vector<UringCompletion>& completions) noexcept {
  io_uring& ring = implementation_->ring;
  const int submitted = io_uring_submit_and_wait(&ring, 1);
  // The kernel is short of memory for the moment: nothing is lost, what was not accepted is handed over next time.
  if (submitted < 0 && submitted != -EINTR) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  io_uring_cqe* entry = nullptr;
  unsigned head = 0;
  unsigned seen = 0;
  io_uring_for_each_cqe(&ring, head, entry) {
    completions.push_back({entry->user_data, entry->res});
    ++seen;
  }
  io_uring_cq_advance(&ring, seen);
}

std::string uring_refusal() {
  try {
    const UringRing ring(2);
    return "";
  } catch (const UringUnavailable& error) {
    return error.what();
  }
}

}  // namespace zipmoe

#else

namespace zipmoe {

struct UringRing::Implementation {};

std::string uring_refusal() { return "this ZipMoE was built without liburing"; }

UringRing::UringRing(uint32_t) { throw UringUnavailable(uring_refusal()); }
UringRing::~UringRing() = default;
// Nobody can call these: there is no ring.
std::string UringRing::register_files(std::span<const int>) { return uring_refusal(); }
std::string UringRing::register_memory(std::span<const std::span<uint8_t>>) { return uring_refusal(); }
void UringRing::forget_memory() noexcept {}
void UringRing::prepare_read(int, uint64_t, uint64_t, uint8_t*, uint64_t) noexcept {}
void UringRing::prepare_wake(int, uint64_t*, uint64_t) noexcept {}
void UringRing::submit_and_wait(std::vector<UringCompletion>&) noexcept {}

}  // namespace zipmoe

#endif
