// Tests of requests on pools share a reader that completes in any order, and a request that checks every weight.
#pragma once

#include <condition_variable>
#include <mutex>
#include <set>
#include <thread>
#include <utility>

#include "tests/packed_model.hpp"

namespace zipmoe {

using namespace std::chrono_literals;

inline constexpr uint32_t kExperts = 12;

inline bool separable(const std::string& codec) { return find_codec(codec).capabilities().separable; }

// Passes reads on and delivers their completions late and in another order, from a thread of its own.
class ShufflingReader final : public Reader, public ReadSink {
 public:
  ShufflingReader(std::unique_ptr<Reader> inner, uint32_t seed) : inner_(std::move(inner)), generator_(seed) {
    courier_ = std::thread([this] { deliver(); });
  }
  ~ShufflingReader() override {
    inner_.reset();  // completes everything
    {
      std::lock_guard lock(mutex_);
      stopping_ = true;
    }
    arrived_.notify_all();
    courier_.join();
  }

  void submit(const ReadJob& job) override {
    {
      std::lock_guard lock(mutex_);
      sink_ = job.sink;
      ++under_way_;
    }
    ReadJob redirected = job;
    redirected.sink = this;
    inner_->submit(redirected);
  }
  void cancel() noexcept override { inner_->cancel(); }
  void read_completed(const ReadCompletion& completion) noexcept override {
    {
      std::lock_guard lock(mutex_);
      held_.push_back(completion);
    }
    arrived_.notify_all();
  }
  ReadCounters counters() const override { return inner_->counters(); }
  std::string mode() const override { return inner_->mode(); }
  std::string fallback_reason() const override { return inner_->fallback_reason(); }

 private:
  void deliver() {
    std::unique_lock lock(mutex_);
    for (;;) {
      // Mostly wait until everything that is under way has arrived: then any of it may come first.
      const bool patient = generator_() % 4 != 0;
      arrived_.wait(lock, [&] { return stopping_ || (!held_.empty() && (!patient || held_.size() == under_way_)); });
      if (held_.empty()) return;
      const size_t chosen = generator_() % held_.size();
      const ReadCompletion completion = held_[chosen];
      held_.erase(held_.begin() + static_cast<ptrdiff_t>(chosen));
      --under_way_;
      const uint32_t delay = generator_() % 40;
      ReadSink* sink = sink_;
      lock.unlock();
      for (uint32_t i = 0; i < delay; ++i) std::this_thread::yield();
      sink->read_completed(completion);
      lock.lock();
    }
  }

  std::unique_ptr<Reader> inner_;
  std::mt19937 generator_;
  std::mutex mutex_;
  std::condition_variable arrived_;
  ReadSink* sink_ = nullptr;
  std::vector<ReadCompletion> held_;
  uint64_t under_way_ = 0;
  bool stopping_ = false;
  std::thread courier_;
};

inline std::unique_ptr<Reader> shuffling_reader(const PackedModel& model, const EngineOptions& options, uint32_t seed) {
  auto inner = std::make_unique<ThreadPoolReader>(std::vector<std::string>{model.path()}, options.reader.threads);
  return std::make_unique<ShufflingReader>(std::move(inner), seed);
}

inline void check_expert(Engine& engine, const PackedModel& model, RecordIndex record) {
  for (uint32_t matrix = 0; matrix < 2; ++matrix) {
    const std::vector<uint16_t>& expected = model.weights(record, matrix);
    if (const std::optional<uint64_t> offset = engine.decoded_offset(record, matrix)) {
      CHECK(*offset % 64 == 0 && engine.residency(record) == Residency::full);
      const auto* weights = reinterpret_cast<const uint16_t*>(engine.arena()->data() + *offset);
      CHECK(std::equal(expected.begin(), expected.end(), weights));
    }
    std::vector<uint16_t> decoded(expected.size());
    engine.decode(record, matrix, 0, kShapes[matrix].rows, decoded);
    CHECK(decoded == expected);
    std::vector<uint16_t> rows(2 * kShapes[matrix].columns);
    engine.decode(record, matrix, 5, 7, rows);
    CHECK(std::equal(rows.begin(), rows.end(), expected.begin() + static_cast<ptrdiff_t>(5 * kShapes[matrix].columns)));
  }
}

inline void check_occupancy(const Engine& engine) {
  const std::vector<PoolSlots> slots = engine.pool_slots();
  const std::vector<PoolSlots> held = engine.pool_occupancy();
  for (size_t group = 0; group < slots.size(); ++group) {
    for (uint32_t pool = 0; pool < kPools; ++pool) CHECK(held[group].experts[pool] <= slots[group].experts[pool]);
  }
}

inline std::vector<Residency> residencies(const Engine& engine) {
  std::vector<Residency> result;
  for (RecordIndex record = 0; record < kExperts; ++record) result.push_back(engine.residency(record));
  return result;
}

// Runs one request, checks every expert; stops after `limit` of them.
inline std::vector<RecordIndex> run(Engine& engine, const PackedModel& model, const std::vector<RecordIndex>& records,
                                    HandOutOrder order = HandOutOrder::as_available, size_t limit = SIZE_MAX) {
  std::vector<RecordIndex> handed_out;
  engine.begin_request(records, order);
  while (handed_out.size() < limit) {
    const RequestStep step = engine.next_expert(1000ms);
    if (step.kind == RequestStep::Kind::finished) break;
    if (step.kind == RequestStep::Kind::waiting) continue;
    handed_out.push_back(records[step.position]);
    check_expert(engine, model, handed_out.back());
  }
  engine.end_request();
  check_occupancy(engine);
  if (limit == SIZE_MAX) {
    CHECK(std::set(handed_out.begin(), handed_out.end()).size() == records.size());
    if (order == HandOutOrder::ascending) CHECK(std::is_sorted(handed_out.begin(), handed_out.end()));
  }
  return handed_out;
}

inline std::vector<RecordIndex> choose(std::mt19937& generator, size_t count) {
  std::vector<RecordIndex> all(kExperts);
  for (RecordIndex record = 0; record < kExperts; ++record) all[record] = record;
  std::shuffle(all.begin(), all.end(), generator);
  all.resize(count);
  return all;
}

}  // namespace zipmoe
