#include "runtime/engine.hpp"

#include <algorithm>
#include <stdexcept>
#include <unordered_set>
#include <utility>

namespace zipmoe {
namespace {

// Dense records in flight at once: enough to keep the reader's threads busy.
constexpr uint64_t kDenseLoadsInFlight = 8;

uint64_t scratch_stride(uint64_t bytes) {
  return round_up(std::max<uint64_t>(bytes, 1) + kReadableTailBytes, kHugePageBytes);
}

std::vector<RecordIndex> dense_records(const EngineOptions& options) {
  std::vector<RecordIndex> dense;
  for (RecordIndex i = 0; i < options.class_of_record.size(); ++i) {
    if (options.class_of_record[i] == ExpertCache::kNotCached) dense.push_back(i);
  }
  return dense;
}

uint64_t dense_bytes(const RecordTable& table, const EngineOptions& options) {
  uint64_t bytes = 0;
  for (const RecordIndex record : dense_records(options)) bytes += table[record].length;
  return round_up(bytes, kHugePageBytes);
}

uint64_t total_scratch_bytes(const EngineOptions& options) {
  uint64_t bytes = 0;
  for (const uint64_t scratch : options.scratch_bytes) bytes += scratch_stride(scratch);
  return bytes;
}

std::unique_ptr<Reader> make_reader(const RecordTable& table, const EngineOptions& options) {
  return std::make_unique<ThreadPoolReader>(table.files(), options.reader);
}

const EngineOptions& checked(const RecordTable& table, const EngineOptions& options) {
  if (options.class_of_record.size() != table.size()) throw std::invalid_argument("every record needs a size class");
  for (RecordIndex i = 0; i < table.size(); ++i) {
    const uint32_t size_class = options.class_of_record[i];
    if (size_class == ExpertCache::kNotCached) continue;
    if (size_class >= options.size_classes.size() || table[i].length > options.size_classes[size_class].slot_bytes) {
      throw std::invalid_argument("record " + table[i].name + " does not fit into the slots of its size class");
    }
  }
  for (const SizeClass& size_class : options.size_classes) {
    if (size_class.slots == 0) throw std::invalid_argument("every size class needs a slot");
  }
  return options;
}

}  // namespace

Engine::Engine(RecordTable table, EngineOptions options) : Engine(std::move(table), std::move(options), nullptr) {}

Engine::Engine(RecordTable table, EngineOptions options, std::unique_ptr<Reader> reader)
    : table_(std::move(table)),
      options_(checked(table_, options)),
      fixed_bytes_(dense_bytes(table_, options_) + total_scratch_bytes(options_)),
      arena_(std::make_shared<Arena>(fixed_bytes_ + ExpertCache::reserved_bytes(options_.size_classes))),
      verifier_(table_, options_.verify),
      dense_offsets_(table_.size()),
      dense_loaded_(table_.size()),
      dense_(dense_records(options_)) {
  uint64_t offset = 0;
  for (const RecordIndex record : dense_) {
    dense_offsets_[record] = offset;
    offset += table_[record].length;
  }
  dense_progress_.bytes_total = offset;
  offset = round_up(offset, kHugePageBytes);
  for (const uint64_t bytes : options_.scratch_bytes) {
    scratch_.emplace_back(arena_->data() + offset, bytes);
    offset += scratch_stride(bytes);
  }
  if (offset > 0) arena_->commit(0, offset);
  cache_ = std::make_unique<ExpertCache>(*arena_, offset, options_.size_classes, options_.class_of_record,
                                         options_.eviction_policy, options_.policy_parameters);
  decoder_ = std::make_unique<RowDecoder>(table_.codec(), options_.instruction_set, options_.decode_threads);
  if (!reader) reader = make_reader(table_, options_);
  loader_ = std::make_unique<RecordLoader>(table_, verifier_, std::move(reader));
  io_mode_ = loader_->reader().mode();
  fallback_reason_ = loader_->reader().fallback_reason();
}

Engine::~Engine() { close(); }

void Engine::require_open() const {
  if (closed_) throw std::logic_error("the engine is closed");
}

LoadProgress Engine::load_dense(std::chrono::milliseconds timeout) {
  std::lock_guard lock(mutex_);
  require_open();
  if (request_) throw std::logic_error("dense records are loaded before the first request");
  const auto deadline = std::chrono::steady_clock::now() + timeout;
  while (!dense_progress_.finished()) {
    while (dense_started_ < dense_.size() && loader_->outstanding() < kDenseLoadsInFlight) {
      const RecordIndex record = dense_[dense_started_++];
      loader_->start(record, arena_->data() + dense_offsets_[record]);
    }
    const auto remaining = std::chrono::ceil<std::chrono::milliseconds>(deadline - std::chrono::steady_clock::now());
    if (remaining.count() <= 0) break;
    const auto outcome = loader_->wait(remaining);
    if (!outcome) break;
    if (outcome->failure) {
      const LoadFailure failure = *outcome->failure;
      // What is under way writes into the arena: let it finish before the caller decides.
      dense_started_ = dense_.size();
      while (loader_->outstanding() > 0) loader_->wait(std::chrono::milliseconds(1000));
      throw RecordError(failure.fault, outcome->record, failure.message);
    }
    dense_loaded_[outcome->record] = true;
    dense_progress_.bytes_done += table_[outcome->record].length;
  }
  return dense_progress_;
}

void Engine::begin_request(std::vector<RecordIndex> records, HandOutOrder order) {
  std::lock_guard lock(mutex_);
  require_open();
  if (request_) throw std::logic_error("another request is open");
  if (loader_->outstanding() > 0) throw std::logic_error("the dense records are still being loaded");
  std::unordered_set<RecordIndex> seen;
  for (const RecordIndex record : records) {
    if (record >= table_.size() || options_.class_of_record[record] == ExpertCache::kNotCached) {
      throw std::invalid_argument("record " + std::to_string(record) + " is not an expert");
    }
    if (!seen.insert(record).second) throw std::invalid_argument("a request names each expert once");
  }
  requested_ = records;
  request_ = std::make_unique<ExpertRequest>(*cache_, *loader_, std::move(records), order);
  handed_out_.reset();
}

RequestStep Engine::next_expert(std::chrono::milliseconds timeout) {
  std::lock_guard lock(mutex_);
  require_open();
  if (!request_) throw std::logic_error("no request is open");
  handed_out_.reset();
  const RequestStep step = request_->next(timeout);
  if (step.kind == RequestStep::Kind::record) handed_out_ = requested_[step.position];
  return step;
}

void Engine::end_request() {
  std::lock_guard lock(mutex_);
  account_request();
}

void Engine::account_request() {
  if (!request_) return;
  counters_.requests += 1;
  counters_.hits += request_->hits();
  counters_.misses += request_->misses();
  counters_.wait_seconds += request_->wait_seconds();
  request_.reset();
  handed_out_.reset();
}

MatrixView Engine::readable_view(RecordIndex record, uint32_t matrix) const {
  if (record >= table_.size()) throw std::out_of_range("no record " + std::to_string(record));
  if (matrix >= table_[record].matrices.size()) throw std::out_of_range("no such matrix in the record");
  if (options_.class_of_record[record] == ExpertCache::kNotCached) {
    if (!dense_loaded_[record]) throw std::logic_error("record " + table_[record].name + " is not loaded");
    return table_.view(record, matrix, arena_->data() + dense_offsets_[record]);
  }
  if (handed_out_ != record) {
    throw std::logic_error("record " + table_[record].name + " is not the one that the request handed out last");
  }
  return table_.view(record, matrix, cache_->data(record));
}

void Engine::decode(RecordIndex record, uint32_t matrix, uint64_t row_begin, uint64_t row_end,
                    std::span<uint16_t> out) {
  std::lock_guard lock(mutex_);
  require_open();
  const MatrixView view = readable_view(record, matrix);
  if (row_begin > row_end || row_end > view.shape.rows) throw std::out_of_range("rows outside of the matrix");
  const uint64_t weights = (row_end - row_begin) * view.shape.columns;
  if (out.size() < weights) throw std::invalid_argument("the output is too small for the rows");
  const auto begin = std::chrono::steady_clock::now();
  try {
    decoder_->decode(view, row_begin, row_end, out.data());
  } catch (const std::runtime_error& error) {
    throw RecordError(RecordFault::invalid_encoding, record, error.what());
  }
  counters_.decode_seconds += std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  counters_.decoded_bytes += weights * sizeof(uint16_t);
}

void Engine::gather(std::span<const RecordIndex> blocks, std::span<const int64_t> rows, std::span<uint16_t> out) {
  std::lock_guard lock(mutex_);
  require_open();
  std::vector<MatrixView> views;
  uint64_t row_count = 0;
  for (const RecordIndex block : blocks) {
    views.push_back(readable_view(block, 0));
    if (views.back().shape.columns != views.front().shape.columns) {
      throw std::invalid_argument("blocks of one matrix have the same number of columns");
    }
    row_count += views.back().shape.rows;
  }
  if (rows.empty()) return;
  for (const int64_t row : rows) {
    if (row < 0 || static_cast<uint64_t>(row) >= row_count) {
      throw std::out_of_range("row " + std::to_string(row) + " of a matrix with " + std::to_string(row_count) +
                              " rows");
    }
  }
  const uint64_t weights = rows.size() * views.front().shape.columns;
  if (out.size() < weights) throw std::invalid_argument("the output is too small for the rows");
  const auto begin = std::chrono::steady_clock::now();
  try {
    decoder_->gather(views, rows, out.data());
  } catch (const std::runtime_error& error) {
    throw RecordError(RecordFault::invalid_encoding, blocks.front(), error.what());
  }
  counters_.decode_seconds += std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  counters_.decoded_bytes += weights * sizeof(uint16_t);
}

void Engine::resize_pool(uint32_t size_class, uint32_t slots) {
  std::lock_guard lock(mutex_);
  require_open();
  if (request_) throw std::logic_error("the pool cannot change its size while a request is open");
  if (slots == 0) throw std::invalid_argument("every size class needs a slot");
  cache_->resize(size_class, slots);
}

std::vector<SizeClass> Engine::size_classes() const {
  std::lock_guard lock(mutex_);
  return cache_->classes();
}

uint64_t Engine::pool_bytes() const {
  std::lock_guard lock(mutex_);
  return cache_->pool_bytes();
}

bool Engine::resident(RecordIndex record) const {
  std::lock_guard lock(mutex_);
  if (record >= table_.size()) throw std::out_of_range("no record " + std::to_string(record));
  return options_.class_of_record[record] == ExpertCache::kNotCached ? dense_loaded_[record] : cache_->resident(record);
}

void Engine::close() {
  std::lock_guard lock(mutex_);
  if (closed_) return;
  account_request();
  counters_.read = loader_->reader().counters();
  counters_.verify_seconds = verifier_.seconds();
  counters_.evictions = cache_->evictions();
  loader_.reset();
  decoder_.reset();
  arena_->release(0, arena_->bytes());
  closed_ = true;
}

EngineCounters Engine::counters() const {
  std::lock_guard lock(mutex_);
  EngineCounters result = counters_;
  if (closed_) return result;
  result.read = loader_->reader().counters();
  result.verify_seconds = verifier_.seconds();
  result.evictions = cache_->evictions();
  if (request_) {
    result.hits += request_->hits();
    result.misses += request_->misses();
    result.wait_seconds += request_->wait_seconds();
  }
  return result;
}

}  // namespace zipmoe
