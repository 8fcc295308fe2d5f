// Reads, cache and worker threads without Python. Runs under the address, undefined and thread sanitizers.
#include <algorithm>
#include <atomic>
#include <cerrno>
#include <condition_variable>
#include <cstring>
#include <mutex>
#include <random>
#include <set>

#include "cache/arena.hpp"
#include "cache/expert_cache.hpp"
#include "cache/lru.hpp"
#include "io/source_file.hpp"
#include "io/thread_pool_reader.hpp"
#include "runtime/worker_pool.hpp"
#include "tests/engine_test_support.hpp"

namespace zipmoe {
namespace {

std::vector<uint8_t> random_bytes(uint64_t count, uint32_t seed) {
  std::mt19937 generator(seed);
  std::vector<uint8_t> bytes(count);
  for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(generator());
  return bytes;
}

// 4096-aligned memory, as every destination of a read is.
class AlignedBuffer {
 public:
  explicit AlignedBuffer(uint64_t bytes)
      : data_(static_cast<uint8_t*>(std::aligned_alloc(4096, round_up(bytes, 4096)))) {
    std::memset(data_, 0, round_up(bytes, 4096));
  }
  ~AlignedBuffer() { std::free(data_); }
  AlignedBuffer(const AlignedBuffer&) = delete;
  AlignedBuffer& operator=(const AlignedBuffer&) = delete;
  uint8_t* data() const { return data_; }

 private:
  uint8_t* data_;
};

// --- io

void test_source_file_reads_up_to_the_end() {
  TemporaryFolder folder;
  const std::vector<uint8_t> bytes = random_bytes(3 * 4096 + 1234, 1);
  write_file(folder.file("a"), bytes);
  for (const IoMode mode : {IoMode::automatic, IoMode::buffered}) {
    const SourceFile file(folder.file("a"), mode);
    CHECK(mode != IoMode::buffered || !file.direct());
    CHECK(file.direct() == file.fallback_reason().empty());
    AlignedBuffer buffer(8 * 4096);
    ReadOutcome outcome = file.read(4096, 2 * 4096, buffer.data());
    CHECK(outcome.error_number == 0 && outcome.bytes == 2 * 4096);
    CHECK(std::memcmp(buffer.data(), bytes.data() + 4096, 2 * 4096) == 0);
    outcome = file.read(0, 8 * 4096, buffer.data());
    CHECK(outcome.error_number == 0 && outcome.bytes == bytes.size());
    CHECK(std::memcmp(buffer.data(), bytes.data(), bytes.size()) == 0);
    outcome = file.read(16 * 4096, 4096, buffer.data());
    CHECK(outcome.error_number == 0 && outcome.bytes == 0);
  }
  CHECK(EXPECT_ERROR(FileOpenError, SourceFile(folder.file("missing"), IoMode::automatic)).error_number() == ENOENT);
}

class CollectingSink final : public ReadSink {
 public:
  void read_completed(const ReadCompletion& completion) noexcept override {
    {
      std::lock_guard lock(mutex_);
      completions_.push_back(completion);
    }
    arrived_.notify_all();
  }
  std::vector<ReadCompletion> wait_for(size_t count) {
    std::unique_lock lock(mutex_);
    arrived_.wait(lock, [&] { return completions_.size() >= count; });
    return completions_;
  }

 private:
  std::mutex mutex_;
  std::condition_variable arrived_;
  std::vector<ReadCompletion> completions_;
};

void test_reader_cuts_reads_into_chunks_and_completes_each_once() {
  TemporaryFolder folder;
  const std::vector<uint8_t> bytes = random_bytes(40 * 4096, 2);
  write_file(folder.file("a"), bytes);
  CollectingSink sink;
  ThreadPoolReader reader({folder.file("a")},
                          {.threads = 3, .chunk_bytes = 2 * 4096, .queue_capacity = 2, .mode = IoMode::automatic});
  AlignedBuffer buffer(40 * 4096);
  for (uint64_t i = 0; i < 8; ++i) {  // more reads than the queue holds: submit waits
    reader.submit({0, i * 5 * 4096, 5 * 4096, buffer.data() + i * 5 * 4096, i, &sink});
  }
  std::set<uint64_t> tags;
  for (const ReadCompletion& completion : sink.wait_for(8)) {
    CHECK(completion.error_number == 0 && completion.bytes == 5 * 4096);
    tags.insert(completion.tag);
  }
  CHECK(tags.size() == 8);
  CHECK(std::memcmp(buffer.data(), bytes.data(), bytes.size()) == 0);
  const ReadCounters counters = reader.counters();
  CHECK(counters.reads == 8 && counters.bytes == bytes.size());
  CHECK(counters.busy_seconds > 0 && counters.longest_seconds <= counters.latency_seconds);
  EXPECT_ERROR(std::out_of_range, reader.submit({1, 0, 4096, buffer.data(), 0, &sink}));
}

void test_reader_reports_short_files_and_completes_what_is_queued_when_it_ends() {
  TemporaryFolder folder;
  write_file(folder.file("a"), random_bytes(6 * 4096 + 100, 3));
  CollectingSink sink;
  AlignedBuffer buffer(64 * 4096);
  {
    ThreadPoolReader reader({folder.file("a")},
                            {.threads = 2, .chunk_bytes = 4096, .queue_capacity = 64, .mode = IoMode::buffered});
    CHECK(reader.mode() == "buffered" && !reader.fallback_reason().empty());
    reader.submit({0, 4 * 4096, 8 * 4096, buffer.data(), 0, &sink});
    CHECK(sink.wait_for(1)[0].bytes == 2 * 4096 + 100);
    for (uint64_t i = 1; i <= 20; ++i) reader.submit({0, 0, 3 * 4096, buffer.data() + i * 3 * 4096, i, &sink});
  }
  CHECK(sink.wait_for(21).size() == 21);
  for (const ReadCompletion& completion : sink.wait_for(21)) {
    CHECK(completion.error_number == 0 || completion.error_number == ECANCELED);
  }
}

void test_cancelled_reads_are_completed() {
  TemporaryFolder folder;
  write_file(folder.file("a"), random_bytes(64 * 4096, 4));
  CollectingSink sink;
  ThreadPoolReader reader({folder.file("a")},
                          {.threads = 1, .chunk_bytes = 4096, .queue_capacity = 64, .mode = IoMode::automatic});
  AlignedBuffer buffer(64 * 4096);
  for (uint64_t i = 0; i < 10; ++i) reader.submit({0, 0, 64 * 4096, buffer.data(), i, &sink});
  reader.cancel();
  for (const ReadCompletion& completion : sink.wait_for(10)) {
    CHECK(completion.error_number == ECANCELED || (completion.error_number == 0 && completion.bytes == 64 * 4096));
  }
  reader.submit({0, 0, 4096, buffer.data(), 10, &sink});  // later reads are not affected
  CHECK(sink.wait_for(11).back().error_number == 0);
}

// --- cache

void test_lru_evicts_the_longest_unused() {
  LeastRecentlyUsed policy(8);
  const auto any = [](RecordIndex) { return true; };
  CHECK(!policy.victim(any));
  for (const RecordIndex record : {3U, 1U, 5U}) policy.admitted(record);
  CHECK(policy.victim(any) == 3U);
  policy.used(3);
  CHECK(policy.victim(any) == 1U);
  CHECK(policy.victim([](RecordIndex record) { return record != 1; }) == 5U);
  policy.removed(1);
  CHECK(policy.victim(any) == 5U);
  policy.removed(5);
  policy.removed(3);
  CHECK(!policy.victim(any));
  EXPECT_ERROR(std::invalid_argument, make_eviction_policy("crystal ball", 1));
}

void fill(ExpertCache& cache, RecordIndex record) {
  uint8_t* slot = cache.acquire(record);
  CHECK(slot != nullptr);
  CHECK(reinterpret_cast<uintptr_t>(slot) % 4096 == 0);
  std::memset(slot, static_cast<int>(record + 1), cache.classes()[cache.size_class(record)].slot_bytes);
  cache.admit(record);
  cache.unpin(record);
}

void check_content(const ExpertCache& cache, RecordIndex record) {
  const uint8_t* data = cache.data(record);
  const uint64_t bytes = cache.classes()[cache.size_class(record)].slot_bytes;
  CHECK(std::all_of(data, data + bytes, [&](uint8_t byte) { return byte == record + 1; }));
}

void test_cache_slots_pins_and_size_classes() {
  const std::vector<SizeClass> classes = {{.slot_bytes = 3 * 4096, .slot_limit = 4, .slots = 2},
                                          {.slot_bytes = 4096, .slot_limit = 2, .slots = 1}};
  Arena arena(ExpertCache::reserved_bytes(classes));
  ExpertCache cache(arena, 0, classes, {0, 0, 0, 0, 1, 1, ExpertCache::kNotCached}, "lru");
  CHECK(cache.slot_count() == 3 && cache.pool_bytes() == 7 * 4096);
  fill(cache, 0);
  fill(cache, 1);
  fill(cache, 4);
  cache.pin(0);
  fill(cache, 2);  // 1 goes, although 0 is older
  CHECK(cache.resident(0) && !cache.resident(1) && cache.resident(2) && cache.resident(4));
  cache.pin(2);
  CHECK(cache.acquire(3) == nullptr);
  cache.unpin(2);
  uint8_t* slot = cache.acquire(3);
  CHECK(slot != nullptr && !cache.resident(2) && !cache.resident(3));
  cache.discard(3);
  CHECK(cache.acquire(1) == slot);
  EXPECT_ERROR(std::logic_error, cache.resize(0, 1));
  cache.admit(1);
  EXPECT_ERROR(std::logic_error, cache.evict(1));
  EXPECT_ERROR(std::out_of_range, cache.acquire(6));
  check_content(cache, 0);
  check_content(cache, 4);
  CHECK(cache.evictions() == 2 && cache.resident_records() == 3);
}

void test_cache_shrinks_to_the_most_recent_and_grows_again() {
  const std::vector<SizeClass> classes = {{.slot_bytes = uint64_t{1} << 20, .slot_limit = 12, .slots = 10}};
  Arena arena(ExpertCache::reserved_bytes(classes));
  ExpertCache cache(arena, 0, classes, std::vector<uint32_t>(12, 0), "lru");
  for (RecordIndex record = 0; record < 10; ++record) fill(cache, record);
  cache.used(0);
  cache.resize(0, 3);
  CHECK(cache.slot_count() == 3 && cache.resident_records() == 3);
  for (const RecordIndex record : {8U, 9U, 0U}) check_content(cache, record);
  cache.resize(0, 12);
  for (RecordIndex record = 1; record < 12; ++record) {
    if (!cache.resident(record)) fill(cache, record);
  }
  CHECK(cache.resident_records() == 12);
  for (RecordIndex record = 0; record < 12; ++record) check_content(cache, record);
  EXPECT_ERROR(std::invalid_argument, cache.resize(0, 13));
}

// --- workers

void test_worker_pool_runs_each_task_once_and_survives_failures() {
  for (const uint32_t threads : {1U, 2U, 5U}) {
    WorkerPool pool(threads);
    CHECK(pool.threads() == threads);
    for (int round = 0; round < 50; ++round) {
      std::vector<std::atomic<int>> done(37);
      pool.run(37, [&](uint32_t task) { done[task].fetch_add(1); });
      for (const std::atomic<int>& count : done) CHECK(count.load() == 1);
      const auto error = EXPECT_ERROR(std::runtime_error, pool.run(20, [](uint32_t task) {
        if (task == 7) throw std::runtime_error("seven");
      }));
      CHECK(std::string(error.what()) == "seven");
    }
  }
}

}  // namespace
}  // namespace zipmoe

int main() {
  zipmoe::test_source_file_reads_up_to_the_end();
  zipmoe::test_reader_cuts_reads_into_chunks_and_completes_each_once();
  zipmoe::test_reader_reports_short_files_and_completes_what_is_queued_when_it_ends();
  zipmoe::test_cancelled_reads_are_completed();
  zipmoe::test_lru_evicts_the_longest_unused();
  zipmoe::test_cache_slots_pins_and_size_classes();
  zipmoe::test_cache_shrinks_to_the_most_recent_and_grows_again();
  zipmoe::test_worker_pool_runs_each_task_once_and_survives_failures();
  std::puts("engine_parts_test: ok");
  return 0;
}
