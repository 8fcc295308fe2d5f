// Both reader backends keep the same promises. Where there is no io_uring, its part is left out, and the reason
// printed.
#include <sys/mman.h>
#include <sys/resource.h>

#include <algorithm>
#include <cerrno>
#include <condition_variable>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>

#include "io/read_queue.hpp"
#include "io/reader_choice.hpp"
#include "io/source_file.hpp"
#include "tests/engine_test_support.hpp"
#include "tests/forbidden_calls.hpp"

namespace zipmoe {
namespace {

constexpr uint64_t kPage = 4096;

std::vector<uint8_t> random_bytes(uint64_t count, uint32_t seed) {
  std::mt19937 generator(seed);
  std::vector<uint8_t> bytes(count);
  for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(generator());
  return bytes;
}

// Page-aligned memory, as every destination of a read is.
class AlignedBuffer {
 public:
  explicit AlignedBuffer(uint64_t bytes)
      : bytes_(bytes), data_(static_cast<uint8_t*>(std::aligned_alloc(kPage, bytes))) {
    std::memset(data_, 0, bytes);
  }
  ~AlignedBuffer() { std::free(data_); }
  AlignedBuffer(const AlignedBuffer&) = delete;
  AlignedBuffer& operator=(const AlignedBuffer&) = delete;
  uint8_t* data() const { return data_; }
  std::span<uint8_t> span() const { return {data_, bytes_}; }

 private:
  uint64_t bytes_;
  uint8_t* data_;
};

class CollectingSink final : public ReadSink {
 public:
  void read_completed(const ReadCompletion& completion) noexcept override {
    std::lock_guard lock(mutex_);
    completions_.push_back(completion);
    arrived_.notify_all();
  }
  std::vector<ReadCompletion> wait_for(size_t count) {
    std::unique_lock lock(mutex_);
    arrived_.wait(lock, [&] { return completions_.size() >= count; });
    return completions_;
  }
  // By tag; every tag once.
  std::map<uint64_t, ReadCompletion> by_tag(size_t count) {
    std::map<uint64_t, ReadCompletion> result;
    for (const ReadCompletion& completion : wait_for(count)) CHECK(result.emplace(completion.tag, completion).second);
    CHECK(result.size() == count);
    return result;
  }

 private:
  std::mutex mutex_;
  std::condition_variable arrived_;
  std::vector<ReadCompletion> completions_;
};

// Also keeps what it is told of chunks.
class ChunkSink final : public ReadSink {
 public:
  using Range = std::pair<uint64_t, uint64_t>;  // begin and length

  void chunk_read(uint64_t tag, uint64_t begin, uint64_t length) noexcept override {
    std::lock_guard lock(mutex_);
    CHECK(!completed_.contains(tag));
    chunks_[tag].insert({begin, length});
  }
  void read_completed(const ReadCompletion& completion) noexcept override {
    {
      std::lock_guard lock(mutex_);
      completed_.insert(completion.tag);
    }
    completions_.read_completed(completion);
  }
  std::map<uint64_t, std::multiset<Range>> wait_for(size_t reads) {
    completions_.wait_for(reads);
    std::lock_guard lock(mutex_);
    return chunks_;
  }

 private:
  CollectingSink completions_;
  std::mutex mutex_;
  std::set<uint64_t> completed_;
  std::map<uint64_t, std::multiset<Range>> chunks_;  // by tag
};

// One way of reading, and how it is told what the tests vary.
struct Backend {
  std::string label;
  IoBackend backend = IoBackend::threads;
  uint32_t completion_threads = 0;
  bool registered = false;

  std::unique_ptr<Reader> open(const std::string& path, uint32_t parallel, uint64_t block_bytes,
                               uint32_t queue_capacity, const AlignedBuffer& memory,
                               IoMode mode = IoMode::automatic) const {
    ReaderOptions options{.backend = backend, .mode = mode};
    options.threads.threads = parallel;
    options.threads.chunk_bytes = options.uring.block_bytes = block_bytes;
    options.threads.queue_capacity = options.uring.queue_capacity = queue_capacity;
    options.uring.queue_depth = parallel;
    options.uring.completion_threads = completion_threads;
    if (registered) options.uring.memory.push_back(memory.span());
    return open_reader({path}, options).reader;
  }
};

std::vector<Backend> backends() {
  std::vector<Backend> result = {{.label = "threads"}};
  if (!uring_refusal().empty()) return result;
  for (const uint32_t threads : {0U, 1U, 3U}) {
    for (const bool registered : {false, true}) {
      result.push_back(
          {"uring, " + std::to_string(threads) + " completion threads" + (registered ? ", registered" : ""),
           IoBackend::uring, threads, registered});
    }
  }
  return result;
}

void test_source_file_reads_up_to_the_end() {
  TemporaryFolder folder;
  const std::vector<uint8_t> bytes = random_bytes(3 * kPage + 1234, 1);
  write_file(folder.file("a"), bytes);
  for (const IoMode mode : {IoMode::automatic, IoMode::buffered}) {
    const SourceFile file(folder.file("a"), mode);
    CHECK(mode != IoMode::buffered || !file.direct());
    CHECK(file.direct() == file.fallback_reason().empty());
    AlignedBuffer buffer(8 * kPage);
    ReadOutcome outcome = file.read(kPage, 2 * kPage, buffer.data());
    CHECK(outcome.error_number == 0 && outcome.bytes == 2 * kPage);
    CHECK(std::memcmp(buffer.data(), bytes.data() + kPage, 2 * kPage) == 0);
    outcome = file.read(0, 8 * kPage, buffer.data());
    CHECK(outcome.error_number == 0 && outcome.bytes == bytes.size());
    CHECK(std::memcmp(buffer.data(), bytes.data(), bytes.size()) == 0);
    outcome = file.read(16 * kPage, kPage, buffer.data());
    CHECK(outcome.error_number == 0 && outcome.bytes == 0);
  }
  CHECK(EXPECT_ERROR(FileOpenError, SourceFile(folder.file("missing"), IoMode::automatic)).error_number() == ENOENT);
}

void test_reads_are_cut_into_blocks_and_completed_once(const Backend& backend) {
  TemporaryFolder folder;
  const std::vector<uint8_t> bytes = random_bytes(40 * kPage, 2);
  write_file(folder.file("a"), bytes);
  CollectingSink sink;
  AlignedBuffer buffer(40 * kPage);
  const auto reader = backend.open(folder.file("a"), 3, 2 * kPage, 2, buffer);
  for (uint64_t i = 0; i < 8; ++i) {  // more reads than the queue holds: submit waits
    reader->submit({0, i * 5 * kPage, 5 * kPage, buffer.data() + i * 5 * kPage, i, &sink});
  }
  for (const auto& [tag, completion] : sink.by_tag(8)) {
    CHECK(completion.error_number == 0 && completion.bytes == 5 * kPage);
  }
  CHECK(std::memcmp(buffer.data(), bytes.data(), bytes.size()) == 0);
  const ReadCounters counters = reader->counters();
  CHECK(counters.reads == 8 && counters.bytes == bytes.size());
  CHECK(counters.busy_seconds > 0 && counters.longest_seconds <= counters.latency_seconds);
  EXPECT_ERROR(std::out_of_range, reader->submit({1, 0, kPage, buffer.data(), 0, &sink}));
  EXPECT_ERROR(std::invalid_argument, reader->submit({0, 0, 0, buffer.data(), 0, &sink}));
}

void test_many_reads_are_submitted_at_once(const Backend& backend) {
  TemporaryFolder folder;
  const std::vector<uint8_t> bytes = random_bytes(200 * kPage, 7);
  write_file(folder.file("a"), bytes);
  CollectingSink sink;
  AlignedBuffer buffer(200 * kPage);
  const auto reader = backend.open(folder.file("a"), 3, 2 * kPage, 16, buffer);
  std::vector<ReadJob> jobs;
  for (uint64_t i = 0; i < 200; ++i) jobs.push_back({0, i * kPage, kPage, buffer.data() + i * kPage, i, &sink});
  jobs[190].length = 0;
  EXPECT_ERROR(std::invalid_argument, reader->submit_all(jobs));  // and none of the others is read
  jobs[190].length = kPage;
  reader->submit_all({});
  reader->submit_all(jobs);  // more than the queue holds: it waits
  for (const auto& [tag, completion] : sink.by_tag(200)) {
    CHECK(completion.error_number == 0 && completion.bytes == kPage);
  }
  CHECK(std::memcmp(buffer.data(), bytes.data(), bytes.size()) == 0);
  CHECK(reader->counters().reads == 200);
}

void test_a_read_goes_to_two_places(const Backend& backend) {
  TemporaryFolder folder;
  const std::vector<uint8_t> bytes = random_bytes(9 * kPage, 3);
  write_file(folder.file("a"), bytes);
  CollectingSink sink;
  AlignedBuffer buffer(20 * kPage);
  for (const uint64_t block : {2 * kPage, 16 * kPage}) {
    std::memset(buffer.data(), 0, 20 * kPage);
    const auto reader = backend.open(folder.file("a"), 2, block, 4, buffer);
    CollectingSink split_sink;
    reader->submit({.file = 0,
                    .offset = kPage,
                    .length = 8 * kPage,
                    .destination = buffer.data() + 10 * kPage,
                    .tag = 1,
                    .sink = &split_sink,
                    .split = 3 * kPage,
                    .rest_destination = buffer.data()});
    CHECK(split_sink.wait_for(1)[0].bytes == 8 * kPage);
    CHECK(std::memcmp(buffer.data() + 10 * kPage, bytes.data() + kPage, 3 * kPage) == 0);
    CHECK(std::memcmp(buffer.data(), bytes.data() + 4 * kPage, 5 * kPage) == 0);
    CHECK(std::all_of(buffer.data() + 5 * kPage, buffer.data() + 10 * kPage, [](uint8_t byte) { return byte == 0; }));
  }
}

void test_sinks_hear_of_every_chunk_before_the_read_is_complete(const Backend& backend) {
  TemporaryFolder folder;
  write_file(folder.file("a"), random_bytes(12 * kPage + 100, 3));
  AlignedBuffer buffer(64 * kPage);
  const auto reader = backend.open(folder.file("a"), 3, 2 * kPage, 4, buffer);
  ChunkSink sink;
  uint8_t* const memory = buffer.data();
  reader->submit({0, 0, 5 * kPage, memory, 0, &sink});
  reader->submit({0, kPage, 5 * kPage, memory + 8 * kPage, 1, &sink, 3 * kPage, memory + 16 * kPage});
  reader->submit({0, 9 * kPage, 8 * kPage, memory + 24 * kPage, 2, &sink});  // beyond the end
  ReadJob background{0, 0, 3 * kPage, memory + 32 * kPage, 3, &sink};
  background.background = true;
  reader->submit(background);
  const auto chunks = sink.wait_for(4);
  using Chunks = std::multiset<ChunkSink::Range>;
  CHECK(chunks.at(0) == Chunks({{0, 2 * kPage}, {2 * kPage, 2 * kPage}, {4 * kPage, kPage}}));
  CHECK(chunks.at(1) == Chunks({{0, 2 * kPage}, {2 * kPage, kPage}, {3 * kPage, 2 * kPage}}));
  CHECK(chunks.at(2) == Chunks({{0, 2 * kPage}}));  // of the next one, some bytes came
  CHECK(chunks.at(3) == Chunks({{0, 2 * kPage}, {2 * kPage, kPage}}));
}

// Lengths of the chunks, in pages, that a read of this length is cut into.
std::vector<uint64_t> pages_of_chunks(ReadQueue& queue, ReadJob job) {
  std::vector<uint64_t> pages;
  queue.push(job);
  uint64_t next = job.offset;
  while (const std::optional<ReadChunk> chunk = queue.try_take()) {
    CHECK(chunk->file_offset() == next && chunk->length() % kPage == 0);
    next += chunk->length();
    pages.push_back(chunk->length() / kPage);
    queue.finish(*chunk, {.bytes = chunk->length(), .error_number = 0}, std::chrono::steady_clock::now());
  }
  CHECK(next == job.offset + job.length);
  return pages;
}

void test_chunks_become_shorter_towards_the_end() {
  constexpr uint64_t kMebibyte = uint64_t{1} << 20;
  ReadQueue queue(1, 4 * kMebibyte, 4);
  CollectingSink sink;
  uint8_t byte = 0;
  ReadJob job{.file = 0, .offset = 8 * kPage, .length = 2952 * kPage, .destination = &byte, .sink = &sink};
  using Pages = std::vector<uint64_t>;
  CHECK(pages_of_chunks(queue, job) == Pages({1024, 964, 482, 256, 226}));  // an expert of 12.1 MB
  for (const auto& [pages, chunks] : {std::pair<uint64_t, Pages>{1, {1}},
                                      {256, {256}},
                                      {383, {383}},  // the rest would be short
                                      {384, {256, 128}},
                                      {1200, {600, 300, 300}}}) {
    job.length = pages * kPage;
    CHECK(pages_of_chunks(queue, job) == chunks);
  }
  job.length = 700 * kPage;  // in two places
  job.split = 100 * kPage;
  job.rest_destination = &byte;
  CHECK(pages_of_chunks(queue, job) == Pages({100, 300, 300}));
  job.background = true;  // each as short as others may have to wait for
  CHECK(pages_of_chunks(queue, job) == Pages({100, 256, 256, 88}));
  ReadQueue short_chunks(1, 2 * kPage, 4);  // not to be cut further
  job = {.file = 0, .offset = 0, .length = 5 * kPage, .destination = &byte, .sink = &sink};
  CHECK(pages_of_chunks(short_chunks, job) == Pages({2, 2, 1}));
}

void test_many_more_reads_than_the_queue_is_deep(const Backend& backend) {
  constexpr uint64_t kReads = 600;
  TemporaryFolder folder;
  const std::vector<uint8_t> bytes = random_bytes(kReads * kPage, 4);
  write_file(folder.file("a"), bytes);
  CollectingSink sink;
  AlignedBuffer buffer(kReads * kPage);
  const auto reader = backend.open(folder.file("a"), 2, kPage, 1024, buffer);
  for (uint64_t i = 0; i < kReads; ++i) {
    const uint64_t place = i * 7 % kReads;
    reader->submit({0, place * kPage, kPage, buffer.data() + place * kPage, place, &sink});
  }
  for (const auto& [tag, completion] : sink.by_tag(kReads)) {
    CHECK(completion.error_number == 0 && completion.bytes == kPage);
  }
  CHECK(std::memcmp(buffer.data(), bytes.data(), bytes.size()) == 0);
}

void test_a_file_that_ends_too_early(const Backend& backend) {
  TemporaryFolder folder;
  const std::vector<uint8_t> bytes = random_bytes(6 * kPage + 100, 5);
  write_file(folder.file("a"), bytes);
  for (const IoMode mode : {IoMode::automatic, IoMode::buffered}) {
    for (const uint64_t block : {kPage, 8 * kPage}) {
      CollectingSink sink;
      AlignedBuffer buffer(64 * kPage);
      const auto reader = backend.open(folder.file("a"), 2, block, 64, buffer, mode);
      CHECK((reader->mode() == "direct") == reader->fallback_reason().empty());
      CHECK(mode != IoMode::buffered || reader->mode() == "buffered");
      reader->submit({0, 4 * kPage, 8 * kPage, buffer.data(), 0, &sink});
      reader->submit({0, 64 * kPage, 8 * kPage, buffer.data() + 8 * kPage, 1, &sink});
      const auto completions = sink.by_tag(2);
      CHECK(completions.at(0).error_number == 0 && completions.at(0).bytes == 2 * kPage + 100);
      CHECK(completions.at(1).error_number == 0 && completions.at(1).bytes == 0);
      CHECK(std::memcmp(buffer.data(), bytes.data() + 4 * kPage, 2 * kPage + 100) == 0);
    }
  }
}

void test_an_error_of_a_read_is_its_own(const Backend& backend) {
  TemporaryFolder folder;
  write_file(folder.file("a"), random_bytes(8 * kPage, 6));
  CollectingSink sink;
  AlignedBuffer buffer(8 * kPage);
  void* nowhere = ::mmap(nullptr, 4 * kPage, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  CHECK(nowhere != MAP_FAILED);
  {
    const auto reader = backend.open(folder.file("a"), 2, kPage, 8, buffer);
    reader->submit({0, 0, 4 * kPage, static_cast<uint8_t*>(nowhere), 0, &sink});
    reader->submit({0, 0, 8 * kPage, buffer.data(), 1, &sink});
    const auto completions = sink.by_tag(2);
    CHECK(completions.at(0).error_number == EFAULT);
    CHECK(completions.at(1).error_number == 0 && completions.at(1).bytes == 8 * kPage);
  }
  ::munmap(nowhere, 4 * kPage);
  // A folder can be opened, and not be read.
  const auto reader = backend.open(folder.file(""), 2, kPage, 8, buffer);
  reader->submit({0, 0, 4 * kPage, buffer.data(), 2, &sink});
  CHECK(sink.by_tag(3).at(2).error_number == EISDIR);
}

void test_what_is_under_way_is_completed_when_the_reader_ends(const Backend& backend) {
  TemporaryFolder folder;
  const std::vector<uint8_t> bytes = random_bytes(64 * kPage, 7);
  write_file(folder.file("a"), bytes);
  for (uint64_t round = 0; round < 120; ++round) {
    const uint64_t reads = round % 20;
    CollectingSink sink;
    AlignedBuffer buffer(20 * 3 * kPage);
    {
      // With a depth of 1, the news of the end come while a read is under way and others wait behind it.
      const auto reader = backend.open(folder.file("a"), round % 2 == 0 ? 1 : 2, kPage, 64, buffer);
      for (uint64_t i = 0; i < reads; ++i) {
        reader->submit({0, i * 3 * kPage, 3 * kPage, buffer.data() + i * 3 * kPage, i, &sink});
      }
    }
    for (const auto& [tag, completion] : sink.by_tag(reads)) {
      CHECK(completion.error_number == ECANCELED || (completion.error_number == 0 && completion.bytes == 3 * kPage));
      if (completion.error_number != 0) continue;
      CHECK(std::memcmp(buffer.data() + tag * 3 * kPage, bytes.data() + tag * 3 * kPage, 3 * kPage) == 0);
    }
  }
}

void test_cancelled_reads_are_completed(const Backend& backend) {
  TemporaryFolder folder;
  write_file(folder.file("a"), random_bytes(64 * kPage, 8));
  CollectingSink sink;
  AlignedBuffer buffer(10 * 64 * kPage);
  const auto reader = backend.open(folder.file("a"), 1, kPage, 64, buffer);
  for (uint64_t i = 0; i < 10; ++i) reader->submit({0, 0, 64 * kPage, buffer.data() + i * 64 * kPage, i, &sink});
  reader->cancel();
  for (const auto& [tag, completion] : sink.by_tag(10)) {
    CHECK(completion.error_number == ECANCELED || (completion.error_number == 0 && completion.bytes == 64 * kPage));
  }
  reader->submit({0, 0, kPage, buffer.data(), 10, &sink});  // later reads are not affected
  CHECK(sink.by_tag(11).at(10).error_number == 0);
}

// The kernel or a container may forbid io_uring at either of its calls.
void test_a_forbidden_io_uring_is_unavailable() {
  TemporaryFolder folder;
  write_file(folder.file("a"), random_bytes(kPage, 10));
  for (const auto& [call, error_number] : {std::pair{SYS_io_uring_setup, ENOSYS}, std::pair{SYS_io_uring_setup, EPERM},
                                           std::pair{SYS_io_uring_enter, EPERM}}) {
    run_with_forbidden_call(static_cast<uint32_t>(call), error_number, [&] {
      const std::string refusal = uring_refusal();
      CHECK(!refusal.empty());
      const auto error = EXPECT_ERROR(UringUnavailable, open_reader({folder.file("a")}, {.backend = IoBackend::uring}));
      CHECK(error.what() == refusal);
      const ChosenReader chosen = open_reader({folder.file("a")}, {.backend = IoBackend::threads});
      CollectingSink sink;
      AlignedBuffer buffer(kPage);
      chosen.reader->submit({0, 0, kPage, buffer.data(), 0, &sink});
      CHECK(sink.by_tag(1).at(0).bytes == kPage);
    });
  }
}

void test_what_cannot_be_registered_is_read_all_the_same() {
  TemporaryFolder folder;
  write_file(folder.file("a"), random_bytes(2 * kPage, 11));
  AlignedBuffer buffer(2 * kPage);
  CHECK(UringReader({folder.file("a")}, {.memory = {buffer.span()}}).registration_refusal().empty());
  void* nowhere = ::mmap(nullptr, kPage, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  CHECK(nowhere != MAP_FAILED);
  UringReader reader({folder.file("a")}, {.memory = {buffer.span(), {static_cast<uint8_t*>(nowhere), kPage}}});
  CHECK(reader.registration_refusal().starts_with("memory not registered: "));
  ReaderOptions options{.backend = IoBackend::uring};
  options.uring.memory.emplace_back(static_cast<uint8_t*>(nowhere), kPage);
  CHECK(open_reader({folder.file("a")}, options).refusal == reader.registration_refusal());
  CollectingSink sink;
  reader.submit({0, 0, 2 * kPage, buffer.data(), 0, &sink});
  CHECK(sink.by_tag(1).at(0).bytes == 2 * kPage);
  ::munmap(nowhere, kPage);
  EXPECT_ERROR(std::invalid_argument, UringReader({folder.file("a")}, {.queue_depth = 0}));
  EXPECT_ERROR(FileOpenError, UringReader({folder.file("missing")}, {}));
}

void test_a_bad_descriptor_is_an_error_of_the_operation() {
  AlignedBuffer buffer(kPage);
  for (const bool registered : {false, true}) {
    UringRing ring(2);
    const int descriptor = ::fileno(stdin);
    if (registered) CHECK(ring.register_files({&descriptor, 1}).empty());
    ring.prepare_read(registered ? 5 : -1, 0, kPage, buffer.data(), 7);
    std::vector<UringCompletion> completions;
    while (completions.empty()) ring.submit_and_wait(completions);
    CHECK(completions.size() == 1 && completions[0].token == 7 && completions[0].result == -EBADF);
  }
}

void run_all() {
  test_a_forbidden_io_uring_is_unavailable();  // first: no thread may run when a process forks
  test_source_file_reads_up_to_the_end();
  test_chunks_become_shorter_towards_the_end();
  for (const Backend& backend : backends()) {
    std::printf("reader_test: %s\n", backend.label.c_str());
    test_reads_are_cut_into_blocks_and_completed_once(backend);
    test_many_reads_are_submitted_at_once(backend);
    test_a_read_goes_to_two_places(backend);
    test_sinks_hear_of_every_chunk_before_the_read_is_complete(backend);
    test_many_more_reads_than_the_queue_is_deep(backend);
    test_a_file_that_ends_too_early(backend);
    test_an_error_of_a_read_is_its_own(backend);
    test_what_is_under_way_is_completed_when_the_reader_ends(backend);
    test_cancelled_reads_are_completed(backend);
  }
  if (const std::string refusal = uring_refusal(); !refusal.empty()) {
    std::printf("reader_test: io_uring left out: %s\n", refusal.c_str());
    return;
  }
  test_what_cannot_be_registered_is_read_all_the_same();
  test_a_bad_descriptor_is_an_error_of_the_operation();
}

}  // namespace
}  // namespace zipmoe

int main() {
  zipmoe::run_all();
  std::puts("reader_test: ok");
  return 0;
}
