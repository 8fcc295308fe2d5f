// Checksums that are computed while bytes arrive: right for every order of chunks, from however many threads, and what
// is wrong is found and named as if all had been read at once. Runs under the address, undefined and thread sanitizers.
#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <numeric>
#include <thread>

#include "codec/arriving_checksum.hpp"
#include "runtime/record_loader.hpp"
#include "tests/packed_model.hpp"

using namespace std::chrono_literals;

namespace zipmoe {
namespace {

constexpr uint64_t kPage = 4096;

std::vector<uint8_t> random_bytes(uint64_t count, uint32_t seed) {
  std::mt19937 generator(seed);
  std::vector<uint8_t> bytes(count);
  for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(generator());
  return bytes;
}

void test_a_stream_gives_the_checksum_of_the_whole() {
  const std::vector<uint8_t> bytes = random_bytes(20000, 1);
  const std::vector<uint64_t> lengths = {0, 1, 16, 200, 240, 241, 255, 256, 257, 1024, 4096, 20000};
  for (const uint64_t length : lengths) {
    for (const uint64_t piece : {1, 7, 64, 256, 1000, 4096, 20000}) {
      Xxh3Stream stream;
      for (uint64_t at = 0; at < length; at += piece) {
        stream.update(std::span(bytes).subspan(at, std::min(piece, length - at)));
      }
      CHECK(stream.digest() == xxh3_64(std::span(bytes).first(length)));
    }
  }
  CHECK(Xxh3Stream().digest() == 0x2d06800538d394c2);  // xxHash's own value of nothing
}

void test_every_order_of_chunks() {
  const std::vector<uint64_t> borders = {0, 1, 300, 4096, 5000, 8192, 10000};  // chunks of any length
  std::vector<uint8_t> bytes = random_bytes(borders.back(), 2);
  const uint64_t expected = xxh3_64(bytes);
  std::vector<size_t> order(borders.size() - 1);
  std::iota(order.begin(), order.end(), size_t{0});
  do {
    std::vector<uint8_t> memory(bytes.size());
    ArrivingChecksum checksum(memory.data(), memory.size());
    for (const size_t chunk : order) {
      const uint64_t begin = borders[chunk];
      const uint64_t end = borders[chunk + 1];
      std::copy(bytes.begin() + static_cast<ptrdiff_t>(begin), bytes.begin() + static_cast<ptrdiff_t>(end),
                memory.begin() + static_cast<ptrdiff_t>(begin));
      checksum.arrived(begin, end);
    }
    std::fill(memory.begin(), memory.end(), uint8_t{0});  // nothing is left to be computed
    CHECK(checksum.finish() == expected);
  } while (std::ranges::next_permutation(order).found);
  // Of some chunks, or of all, nobody was told.
  for (const size_t told : {size_t{0}, size_t{2}, size_t{5}}) {
    ArrivingChecksum checksum(bytes.data(), bytes.size());
    for (size_t chunk = 0; chunk < told; ++chunk) checksum.arrived(borders[chunk + 1], borders[chunk + 2]);
    CHECK(checksum.finish() == expected);
  }
}

void test_chunks_from_several_threads() {
  constexpr uint64_t kChunks = 200;
  const std::vector<uint8_t> bytes = random_bytes(kChunks * kPage, 3);
  const uint64_t expected = xxh3_64(bytes);
  for (uint32_t round = 0; round < 20; ++round) {
    std::vector<uint64_t> order(kChunks);
    std::iota(order.begin(), order.end(), uint64_t{0});
    std::mt19937 generator(round);
    for (uint64_t i = 0; i < kChunks; i += 8) {  // nearly in order, as chunks are, or in any
      std::shuffle(order.begin() + static_cast<ptrdiff_t>(round % 2 == 0 ? i : 0),
                   order.begin() + static_cast<ptrdiff_t>(i + 8), generator);
    }
    std::vector<uint8_t> memory(bytes.size());
    ArrivingChecksum checksum(memory.data(), memory.size());
    std::atomic<uint64_t> next{0};
    {
      std::vector<std::jthread> threads;
      for (int thread = 0; thread < 4; ++thread) {
        threads.emplace_back([&] {
          for (uint64_t i = next++; i < kChunks; i = next++) {
            const uint64_t begin = order[i] * kPage;
            std::memcpy(memory.data() + begin, bytes.data() + begin, kPage);
            checksum.arrived(begin, begin + kPage);
          }
        });
      }
    }
    const uint64_t spent = checksum.nanoseconds();
    CHECK(spent > 0);
    std::fill(memory.begin(), memory.end(), uint8_t{0});  // the last of them has computed the rest
    CHECK(checksum.finish() == expected && checksum.nanoseconds() == spent);
  }
}

// Reads from an image of the file, page by page in any order, with several threads that tell of their pages; a test may
// say how the next reads end.
class PageReader final : public Reader {
 public:
  PageReader(std::vector<uint8_t> image, uint32_t seed) : image_(std::move(image)), generator_(seed) {}

  std::vector<uint8_t>& image() { return image_; }
  // Reads from now on: only so many of their pages are read, the error is theirs then (0: the file ends there).
  void end_after(uint64_t pages, int error_number) {
    pages_ = pages;
    error_number_ = error_number;
  }
  void read_all() { pages_ = UINT64_MAX; }

  void submit(const ReadJob& job) override {
    std::vector<uint64_t> order(job.length / kPage);
    std::iota(order.begin(), order.end(), uint64_t{0});
    if (order.size() > pages_ && error_number_ == 0) order.resize(pages_);
    std::shuffle(order.begin(), order.end(), generator_);
    const bool whole = order.size() == job.length / kPage && order.size() <= pages_;
    order.resize(std::min<uint64_t>(order.size(), pages_));
    std::atomic<size_t> next{0};
    {
      std::vector<std::jthread> threads;
      for (int thread = 0; thread < 3; ++thread) {
        threads.emplace_back([&] {
          for (size_t i = next++; i < order.size(); i = next++) {
            const uint64_t at = order[i] * kPage;
            std::memcpy(job.destination_of(at), image_.data() + job.offset + at, kPage);
            job.sink->chunk_read(job.tag, at, kPage);
          }
        });
      }
    }
    job.sink->read_completed({job.tag, order.size() * kPage, whole ? 0 : error_number_});
  }
  void cancel() noexcept override {}
  ReadCounters counters() const override { return {}; }
  std::string mode() const override { return "direct"; }
  std::string fallback_reason() const override { return {}; }

 private:
  std::vector<uint8_t> image_;
  std::mt19937 generator_;
  uint64_t pages_ = UINT64_MAX;
  int error_number_ = 0;
};

std::vector<uint8_t> contents(const std::string& path) {
  std::ifstream stream(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(stream), std::istreambuf_iterator<char>()};
}

// A loader with such a reader, and places for one record as a whole and for its parts.
struct Loading {
  Loading(const PackedModel& model, VerifyMode mode, uint32_t seed = 1)
      : table(model.table()), verifier(table, mode), whole(place()), parts{place(), place()} {
    auto owned = std::make_unique<PageReader>(contents(model.path()), seed);
    reader = owned.get();
    loader.emplace(table, verifier, std::move(owned));
  }

  // Pages of memory, and what may be read behind them.
  static std::vector<uint8_t> place() { return std::vector<uint8_t>(64 * kPage); }
  static uint8_t* aligned(std::vector<uint8_t>& memory) {
    return memory.data() + (kPage - reinterpret_cast<uintptr_t>(memory.data()) % kPage) % kPage;
  }

  std::optional<LoadFailure> load(RecordIndex record) {
    loader->start(record, aligned(whole));
    return loader->wait(10000ms)->failure;
  }
  std::optional<LoadFailure> load_ahead(RecordIndex record) {
    loader->start_ahead(record, aligned(whole));
    return loader->take_ahead(10000ms)->failure;
  }
  std::optional<LoadFailure> load_parts(RecordIndex record, const std::array<bool, 2>& missing) {
    loader->start_parts(record, {aligned(parts[0]), aligned(parts[1])}, missing);
    return loader->wait(10000ms)->failure;
  }

  RecordTable table;
  RecordVerifier verifier;
  std::vector<uint8_t> whole;
  std::array<std::vector<uint8_t>, 2> parts;
  PageReader* reader;
  std::optional<RecordLoader> loader;
};

bool is_fault(const std::optional<LoadFailure>& failure, RecordFault fault) {
  return failure.has_value() && failure->fault == fault;
}

std::string hexadecimal(uint64_t value) {
  char text[17];
  std::snprintf(text, sizeof text, "%016llx", static_cast<unsigned long long>(value));
  return text;
}

void test_damage_in_any_page_is_found_and_named() {
  for (const std::string& codec : codecs_to_test()) {
    const PackedModel model(codec, 2, codec == "fx3" ? 1 : 2);
    Loading loading(model, VerifyMode::always);
    const Record& record = loading.table[1];
    const std::vector<uint8_t> intact = loading.reader->image();
    const auto parts = static_cast<uint32_t>(record.extents.size());
    for (uint64_t at = 1000; at < record.length; at += kPage) {
      loading.reader->image() = intact;
      CHECK(!loading.load(1) && !loading.load_parts(1, {true, parts == 2}));
      loading.reader->image()[record.offset + at] ^= 4;
      const uint32_t damaged = parts == 2 && at >= record.extents[1].offset ? 1 : 0;
      const Extent& extent = record.extents[damaged];
      const uint64_t found = xxh3_64({loading.reader->image().data() + record.offset + extent.offset, extent.length});
      const std::string message = "checksum " + hexadecimal(found) + " instead of " + hexadecimal(extent.xxh3_64) +
                                  " over the " + std::to_string(extent.length) + " bytes at offset " +
                                  std::to_string(record.offset + extent.offset) + " (extent " +
                                  std::string(name(loading.table.codec().section_kinds()[damaged])) + ")";
      const auto failures = {loading.load(1), loading.load_ahead(1), loading.load_parts(1, {true, parts == 2}),
                             loading.load_parts(1, {damaged == 0, damaged == 1})};
      for (const auto& failure : failures) {
        CHECK(is_fault(failure, RecordFault::checksum_mismatch) && failure->message == message);
      }
      if (parts == 2) CHECK(!loading.load_parts(1, {damaged == 1, damaged == 0}));  // the other part is intact
      CHECK(!loading.load(0));
    }
    CHECK(loading.verifier.seconds() > 0);
  }
}

void test_a_read_that_ended_early_leaves_nothing_to_the_next() {
  for (const std::string& codec : codecs_to_test()) {
    const PackedModel model(codec, 2, codec == "fx3" ? 1 : 2);
    Loading loading(model, VerifyMode::always, 7);
    const Record& record = loading.table[0];
    const std::vector<uint8_t> intact = loading.reader->image();
    std::vector<uint8_t> damaged = intact;
    for (uint64_t at = 0; at < record.length; at += kPage) damaged[record.offset + at] ^= 1;
    for (uint64_t pages = 0; pages < record.length / kPage; ++pages) {
      for (const bool damaged_first : {true, false}) {
        loading.reader->image() = damaged_first ? damaged : intact;
        loading.reader->end_after(pages, ECANCELED);
        CHECK(is_fault(loading.load_ahead(0), RecordFault::read_failed));
        loading.reader->end_after(pages, EIO);
        CHECK(is_fault(loading.load(0), RecordFault::read_failed));
        loading.reader->end_after(pages, 0);
        const auto failure = loading.load(0);
        CHECK(is_fault(failure, RecordFault::truncated));
        CHECK(failure->message == "only " + std::to_string(pages * kPage) + " of " + std::to_string(record.length) +
                                      " bytes are there at offset " + std::to_string(record.offset));
        loading.reader->read_all();
        loading.reader->image() = damaged_first ? intact : damaged;
        const auto next = loading.load(0);
        CHECK(damaged_first ? !next : is_fault(next, RecordFault::checksum_mismatch));
      }
    }
  }
}

void test_what_is_verified_when() {
  const PackedModel model("fx3", 2, 1);
  const uint64_t weights =
      model.record(0).matrices[0].sections[0].offset + model.record(0).matrices[0].sections[0].length - 1;
  for (const VerifyMode mode : {VerifyMode::always, VerifyMode::first, VerifyMode::never}) {
    Loading loading(model, mode);
    const std::vector<uint8_t> intact = loading.reader->image();
    std::vector<uint8_t> damaged = intact;
    damaged[model.record(0).offset + weights] ^= 1;
    loading.reader->image() = damaged;
    for (int attempt = 0; attempt < 2; ++attempt) {  // what failed is no first read
      CHECK(is_fault(loading.load(0), RecordFault::checksum_mismatch) == (mode != VerifyMode::never));
    }
    loading.reader->image() = intact;
    CHECK(!loading.load(0));
    loading.reader->image() = damaged;
    CHECK(is_fault(loading.load(0), RecordFault::checksum_mismatch) == (mode == VerifyMode::always));
  }
}

void test_the_readers_of_the_executor() {
  std::vector<IoBackend> backends = {IoBackend::threads};
  if (uring_refusal().empty()) backends.push_back(IoBackend::uring);
  for (const IoBackend backend : backends) {
    for (const std::string& codec : codecs_to_test()) {
      const PackedModel model(codec, 6, codec == "fx3" ? 1 : 2);
      EngineOptions options = model.options(1);
      options.reader.backend = backend;
      const RecordTable table = model.table();
      RecordVerifier verifier(table, VerifyMode::always);
      RecordLoader loader(table, verifier, open_reader({model.path()}, options.reader).reader);
      std::vector<std::vector<uint8_t>> places;
      for (int record = 0; record < 6; ++record) places.push_back(Loading::place());
      const uint64_t pages = table[2].length / kPage;
      for (uint64_t page = 0; page < pages; ++page) {
        model.flip_byte(table[2].offset + page * kPage + 77);
        for (RecordIndex record = 0; record < 6; ++record) loader.start(record, Loading::aligned(places[record]));
        for (int i = 0; i < 6; ++i) {
          const LoadOutcome outcome = loader.wait(10000ms).value();
          CHECK(is_fault(outcome.failure, RecordFault::checksum_mismatch) == (outcome.record == 2));
        }
        model.flip_byte(table[2].offset + page * kPage + 77);
      }
    }
  }
}

}  // namespace
}  // namespace zipmoe

int main() {
  zipmoe::test_a_stream_gives_the_checksum_of_the_whole();
  zipmoe::test_every_order_of_chunks();
  zipmoe::test_chunks_from_several_threads();
  zipmoe::test_damage_in_any_page_is_found_and_named();
  zipmoe::test_a_read_that_ended_early_leaves_nothing_to_the_next();
  zipmoe::test_what_is_verified_when();
  zipmoe::test_the_readers_of_the_executor();
  std::puts("arriving_checksum_test: all passed");
  return 0;
}
