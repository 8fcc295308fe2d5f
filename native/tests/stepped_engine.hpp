// Tests of look-ahead share an engine whose reads are carried out one by one, when the test says so.
#pragma once

#include <cerrno>
#include <chrono>
#include <memory>
#include <set>
#include <utility>
#include <vector>

#include "io/read_queue.hpp"
#include "io/source_file.hpp"
#include "tests/packed_model.hpp"

namespace zipmoe {

// Reads when it is told to, one chunk at a time, and keeps a record of it.
class SteppedReader final : public Reader {
 public:
  explicit SteppedReader(const PackedModel& model) : files_({model.path()}, IoMode::automatic), queue_(1, 4096, 64) {}
  ~SteppedReader() override {
    queue_.stop();
    run();
  }
  void submit(const ReadJob& job) override {
    queue_.push(job);
    if (at_once) run();
  }
  void cancel() noexcept override {
    queue_.cancel();
    run();  // whoever cancels waits for the end
  }
  bool promote(uint64_t tag) noexcept override { return queue_.promote(tag); }
  void cancel_background() noexcept override { queue_.cancel_background(); }
  ReadCounters counters() const override { return queue_.counters(); }
  std::string mode() const override { return "direct"; }
  std::string fallback_reason() const override { return {}; }

  // False: nothing may be read now.
  bool step() {
    const std::optional<ReadChunk> chunk = queue_.try_take();
    if (!chunk) return false;
    ReadOutcome outcome{.bytes = 0, .error_number = ECANCELED};
    if (!chunk->skip()) {
      log.push_back(chunk->job().tag);
      outcome = files_[0].read(chunk->file_offset(), chunk->length(), chunk->destination());
    }
    chunk->tell_sink(outcome);
    const auto finished = queue_.finish(*chunk, outcome, std::chrono::steady_clock::now());
    if (finished) finished->tell_sink();
    return true;
  }
  void run() {
    while (step()) {
    }
  }

  bool at_once = true;
  std::vector<uint64_t> log;  // tag of every chunk

 private:
  SourceFiles files_;
  ReadQueue queue_;
};

struct Stepped {
  // `layers`: into which the experts are divided.
  explicit Stepped(uint32_t slots, uint32_t spared, uint32_t experts = 12, uint32_t layers = 1)
      : model("fx3", experts, 1), experts_(experts) {
    auto owned = std::make_unique<SteppedReader>(model);
    reader = owned.get();
    EngineOptions options = model.options(slots);
    options.policy_parameters.requests_per_step = layers;
    engine = std::make_unique<Engine>(model.table(), options, std::move(owned));
    load_dense(*engine);
    engine->enable_look_ahead(spared);
    reader->at_once = false;
    reader->log.clear();
  }
  // Hands everybody out whose reads are carried out now, checks the weights and ends the request.
  void finish_request(const std::vector<RecordIndex>& records) {
    reader->run();
    for (size_t i = 0; i < records.size(); ++i) check(records[next().position]);
    CHECK(next().kind == RequestStep::Kind::finished);
    engine->end_request();
  }
  RequestStep next() { return engine->next_expert(std::chrono::milliseconds(0)); }
  void check(RecordIndex record) {
    const std::vector<uint16_t>& expected = model.weights(record, 1);
    std::vector<uint16_t> decoded(expected.size());
    engine->decode(record, 1, 0, kShapes[1].rows, decoded);
    CHECK(decoded == expected);
  }
  std::set<RecordIndex> residents() const {
    std::set<RecordIndex> found;
    for (RecordIndex record = 0; record < experts_; ++record) {
      if (engine->resident(record)) found.insert(record);
    }
    return found;
  }
  uint64_t resident() const { return residents().size(); }

  PackedModel model;
  SteppedReader* reader = nullptr;
  std::unique_ptr<Engine> engine;

 private:
  uint32_t experts_;
};

}  // namespace zipmoe
