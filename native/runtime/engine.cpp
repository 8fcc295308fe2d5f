#include "runtime/engine.hpp"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <unordered_set>
#include <utility>

#include "runtime/full_demotion.hpp"

namespace zipmoe {
namespace {

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
  return round_up(DenseRecords::resident_bytes(table, dense_records(options), options.rows_on_demand), kHugePageBytes);
}

uint64_t total_scratch_bytes(const EngineOptions& options) {
  uint64_t bytes = 0;
  for (const uint64_t scratch : options.scratch_bytes) bytes += scratch_stride(scratch);
  return bytes;
}

void require_fit(bool condition, const RecordTable& table, RecordIndex record, const char* what) {
  if (!condition) throw std::invalid_argument("record " + table[record].name + " " + what);
}

void check_pools(const RecordTable& table, const EngineOptions& options) {
  const EnginePools& pools = *options.pools;
  const bool separable = table.codec().capabilities().separable;
  std::vector<bool> pooled(table.size());
  for (const PoolGroup& group : pools.groups) {
    const PoolClass& shape = pools.classes.at(group.pool_class);
    if ((shape.part_bytes[1] > 0) != separable) {
      throw std::invalid_argument("parts are held apart with separable codecs, and only with them");
    }
    for (const RecordIndex record : group.experts) {
      require_fit(options.class_of_record.at(record) != ExpertCache::kNotCached, table, record, "is not an expert");
      require_fit(table[record].extents.front().offset == 0, table, record, "does not begin with its first extent");
      for (uint32_t extent = 0; extent < table[record].extents.size(); ++extent) {
        const Section part = table.part(record, extent);
        require_fit(part.offset % kReadAlignmentBytes == 0, table, record, "has parts that cannot be read alone");
        require_fit(part.length <= shape.part_bytes[extent], table, record, "does not fit into the slots of its parts");
      }
      require_fit(table.decoded_bytes(record) <= shape.full_bytes, table, record, "does not fit into an F slot");
      require_fit(shape.exponent_buffers == 0 || table.exponent_bytes(record) <= shape.exponent_bytes, table, record,
                  "does not fit into the buffers of exponents");
      pooled[record] = true;
    }
  }
  for (RecordIndex i = 0; i < table.size(); ++i) {
    const bool expert = options.class_of_record[i] != ExpertCache::kNotCached;
    require_fit(pooled[i] == expert, table, i, "is an expert without a group");
  }
}

uint64_t reserved_bytes(const EngineOptions& options) {
  return options.pools ? PoolMemory::reserved_bytes(options.pools->classes, options.pools->groups)
                       : ExpertCache::reserved_bytes(options.size_classes);
}

const EngineOptions& checked(const RecordTable& table, const EngineOptions& options) {
  if (options.class_of_record.size() != table.size()) throw std::invalid_argument("every record needs a size class");
  if (options.pools) {
    check_pools(table, options);
    return options;
  }
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
      arena_(std::make_shared<Arena>(fixed_bytes_ + reserved_bytes(options_))),
      verifier_(table_, options_.verify) {
  uint64_t offset = dense_bytes(table_, options_);
  for (const uint64_t bytes : options_.scratch_bytes) {
    scratch_.emplace_back(arena_->data() + offset, bytes);
    offset += scratch_stride(bytes);
  }
  if (offset > 0) arena_->commit(0, offset);
  if (options_.populate_threads > 0) arena_->prepare_populating(options_.populate_threads);
  if (options_.pools) {
    lay_out_pools(offset);
  } else {
    cache_ = std::make_unique<ExpertCache>(*arena_, offset, options_.size_classes, options_.class_of_record,
                                           options_.eviction_policy, options_.policy_parameters);
  }
  open_policy_replay();
  decoder_ = std::make_unique<RowDecoder>(table_.codec(), options_.instruction_set, options_.decode_threads);
  if (table_.codec().capabilities().fused) compute_threads_ = std::make_unique<ComputeThreads>(options_.decode_threads);
  if (!reader) {
    ChosenReader chosen = open_reader(table_.files(), options_.reader);
    reader = std::move(chosen.reader);
    uring_refusal_ = std::move(chosen.refusal);
  }
  loader_ = std::make_unique<RecordLoader>(table_, verifier_, std::move(reader), ahead_.get());
  dense_ = std::make_unique<DenseRecords>(table_, dense_records(options_), options_.rows_on_demand,
                                          options_.keep_row_details, options_.verify, *loader_, arena_->data());
  io_mode_ = loader_->reader().mode();
  fallback_reason_ = loader_->reader().fallback_reason();
}

Engine::~Engine() { close(); }

void Engine::lay_out_pools(uint64_t offset) {
  const EnginePools& pools = *options_.pools;
  pool_memory_ = std::make_unique<PoolMemory>(*arena_, offset, pools.classes, pools.groups, table_.size());
  if (std::any_of(pools.classes.begin(), pools.classes.end(), [](const auto& c) { return c.exponent_buffers > 0; })) {
    ahead_ = std::make_unique<DecompressAhead>(table_, options_.decode_threads);
  }
  PolicyParameters parameters = options_.policy_parameters;
  parameters.requests_per_step = 1;
  for (const PoolGroup& group : pools.groups) {
    dispatch_.push_back(
        std::make_unique<LayerPools>(PoolOptions{.experts = static_cast<uint32_t>(group.experts.size()),
                                                 .slots = group.slots,
                                                 .policy = options_.eviction_policy,
                                                 .parameters = parameters,
                                                 .tolerance = pools.tolerance,
                                                 .staging = pools.classes.at(group.pool_class).staging}));
    ++parameters.seed;
  }
}

void Engine::require_open() const {
  if (closed_) throw std::logic_error("the engine is closed");
}

LoadProgress Engine::load_dense(std::chrono::milliseconds timeout) {
  std::lock_guard lock(mutex_);
  require_open();
  if (request_) throw std::logic_error("dense records are loaded before the first request");
  const LoadProgress progress = dense_->load(timeout);
  if (progress.finished()) arena_->begin_populating();  // not before: dense records wait for fresh memory, too
  return progress;
}

// What reading and decoding have taken so far; until both have been seen, they count as equally fast.
ReadRates Engine::measured_rates() const {
  ReadRates rates;
  const ReadCounters read = loader_->reader().counters();
  const DecompressAhead::Counters ahead = ahead_ ? ahead_->counters() : DecompressAhead::Counters{};
  if (read.busy_seconds > 0 && read.bytes > 0 && ahead.seconds > 0) {
    rates.read_bytes_per_second = static_cast<double>(read.bytes) / read.busy_seconds;
    rates.decode_bytes_per_second =
        2 * static_cast<double>(ahead.bytes) * options_.decode_threads / ahead.seconds;  // two bytes of BF16 for each
    return rates;
  }
  if (read.busy_seconds <= 0 || read.bytes == 0 || counters_.decode_seconds <= 0 || counters_.decoded_bytes == 0) {
    return rates;
  }
  rates.read_bytes_per_second = static_cast<double>(read.bytes) / read.busy_seconds;
  rates.decode_bytes_per_second = static_cast<double>(counters_.decoded_bytes) / counters_.decode_seconds;
  return rates;
}

void Engine::begin_request(std::vector<RecordIndex> records, HandOutOrder order, std::vector<uint32_t> tokens) {
  std::lock_guard lock(mutex_);
  require_open();
  if (request_) throw std::logic_error("another request is open");
  if (loader_->outstanding() > 0) throw std::logic_error("the dense records are still being loaded");
  std::unordered_set<RecordIndex> seen;
  require_experts(records);
  for (const RecordIndex record : records) {
    if (!seen.insert(record).second) throw std::invalid_argument("a request names each expert once");
  }
  handed_out_.reset();
  handed_out_any_ = handed_out_all_ = false;
  requested_ = records;
  adopt_changed_policy();
  if (!pool_memory_) {
    request_ = std::make_unique<ExpertRequest>(*cache_, *loader_, std::move(records), order, look_ahead_.get());
    start_predicted();
    return;
  }
  const uint32_t group = records.empty() ? 0 : pool_memory_->expert(records.front()).group;
  auto request = std::make_unique<PooledRequest>(PoolContext{.table = table_,
                                                             .memory = *pool_memory_,
                                                             .dispatch = *dispatch_.at(group),
                                                             .loader = *loader_,
                                                             .decoder = *decoder_,
                                                             .ahead = ahead_.get(),
                                                             .workers = options_.decode_threads,
                                                             .rates = measured_rates(),
                                                             .read_order = options_.pools->read_order},
                                                 std::move(records), std::move(tokens), order);
  pooled_request_ = request.get();
  request_ = std::move(request);
}

RequestStep Engine::next_expert(std::chrono::milliseconds timeout) {
  std::lock_guard lock(mutex_);
  require_open();
  if (!request_) throw std::logic_error("no request is open");
  handed_out_.reset();
  const RequestStep step = request_->next(timeout);
  if (step.kind == RequestStep::Kind::record) {
    handed_out_ = requested_[step.position];
    handed_out_any_ = true;
  }
  return step;
}

bool Engine::take_all() {
  std::lock_guard lock(mutex_);
  require_open();
  if (!request_) throw std::logic_error("no request is open");
  if (!request_->take_all()) return false;
  handed_out_any_ = true;
  handed_out_all_ = true;
  return true;
}

void Engine::end_request() {
  std::lock_guard lock(mutex_);
  const bool ended = request_ != nullptr;
  account_request();
  if (ended && look_ahead_) look_ahead_->go_on();  // who was pinned may make room
}

void Engine::abandon_request() {
  std::lock_guard lock(mutex_);
  drop_request();
}

void Engine::account_request() {
  if (!request_) return;
  counters_ = with_request(counters_);
  counters_.requests += 1;
  replay_request(requested_);
  drop_request();
}

void Engine::drop_request() {
  pooled_request_ = nullptr;
  request_.reset();
  handed_out_.reset();
  handed_out_all_ = false;
}

void Engine::require_begun(std::span<const RecordIndex> records) const {
  std::lock_guard lock(mutex_);
  require_open();
  if (!request_ || handed_out_any_ || !std::ranges::equal(records, requested_)) {
    throw std::invalid_argument("no request for these experts is open from which nobody was handed out");
  }
}

void Engine::require_handed_out(RecordIndex record) const {
  if (handed_out_ == record) return;
  if (handed_out_all_ && std::ranges::find(requested_, record) != requested_.end()) return;
  throw std::logic_error("record " + table_[record].name + " is not the one that the request handed out last");
}

MatrixView Engine::readable_view(RecordIndex record, uint32_t matrix) const {
  if (record >= table_.size()) throw std::out_of_range("no record " + std::to_string(record));
  if (matrix >= table_[record].matrices.size()) throw std::out_of_range("no such matrix in the record");
  if (options_.class_of_record[record] == ExpertCache::kNotCached) return dense_->view(record, matrix);
  require_handed_out(record);
  if (pool_memory_) return table_.view(record, matrix, pooled_request_->current_places());
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
  if (in_full_pool(record)) {
    const uint8_t* decoded = pool_memory_->full(record) + table_.decoded_offset(record, matrix);
    std::memcpy(out.data(), decoded + row_begin * view.shape.columns * sizeof(uint16_t), weights * sizeof(uint16_t));
    return;
  }
  if (pool_memory_ && options_.class_of_record[record] != ExpertCache::kNotCached) {
    pooled_request_->decode(matrix, row_begin, row_end, out.data());
    return;
  }
  count_decoding(record, weights, [&] {
    if (dense_->on_demand(record))
      return dense_->row_reader()->decode(record, row_begin, row_end, out.data(), *decoder_);
    decoder_->decode(view, row_begin, row_end, out.data());
    return 0.0;
  });
}

// `decode` decodes this many weights of a matrix that begins with `record`; returns the seconds that it waited for
// reads.
template <typename Decode>
void Engine::count_decoding(RecordIndex record, uint64_t weights, Decode decode) {
  const auto begin = std::chrono::steady_clock::now();
  double waited = 0;
  try {
    waited = decode();
  } catch (const RecordError&) {
    throw;
  } catch (const std::runtime_error& error) {
    throw RecordError(RecordFault::invalid_encoding, record, error.what());
  }
  const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - begin;
  counters_.wait_seconds += waited;
  counters_.decode_seconds += elapsed.count() - waited;
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
  const bool absent = std::ranges::any_of(blocks, [this](RecordIndex block) { return dense_->on_demand(block); });
  count_decoding(blocks.front(), weights, [&] {
    if (absent) return dense_->row_reader()->gather(blocks, rows, out.data(), *decoder_);
    decoder_->gather(views, rows, out.data());
    return 0.0;
  });
}

bool Engine::in_full_pool(RecordIndex record) const {
  return pool_memory_ && options_.class_of_record.at(record) != ExpertCache::kNotCached &&
         pool_memory_->residency(record) == Residency::full;
}

std::optional<uint64_t> Engine::decoded_offset(RecordIndex record, uint32_t matrix) const {
  std::lock_guard lock(mutex_);
  require_open();
  if (record >= table_.size()) throw std::out_of_range("no record " + std::to_string(record));
  if (matrix >= table_[record].matrices.size()) throw std::out_of_range("no such matrix in the record");
  require_handed_out(record);
  if (!in_full_pool(record)) return std::nullopt;
  const uint8_t* decoded = pool_memory_->full(record) + table_.decoded_offset(record, matrix);
  return static_cast<uint64_t>(decoded - arena_->data());
}

uint64_t Engine::pool_bytes() const {
  std::lock_guard lock(mutex_);
  return pool_memory_ ? pool_memory_->slot_bytes() : cache_->pool_bytes();
}

bool Engine::resident(RecordIndex record) const {
  const Residency found = residency(record);
  return found == Residency::full || found == Residency::both_chunks;
}

Residency Engine::residency(RecordIndex record) const {
  std::lock_guard lock(mutex_);
  require_open();
  if (record >= table_.size()) throw std::out_of_range("no record " + std::to_string(record));
  const bool dense = options_.class_of_record[record] == ExpertCache::kNotCached;
  if (!dense && pool_memory_) return pool_memory_->residency(record);
  const bool whole = dense ? dense_->resident(record) : cache_->resident(record);
  return whole ? Residency::both_chunks : Residency::miss;
}

void Engine::close() {
  std::lock_guard lock(mutex_);
  if (closed_) return;
  account_request();
  counters_ = with_parts(counters_);
  loader_.reset();  // its reads end before the memory goes that they write to
  ahead_.reset();
  dense_.reset();
  decoder_.reset();
  compute_threads_.reset();
  output_memory_.clear();
  arena_->stop_populating();
  arena_->release(0, arena_->bytes());
  closed_ = true;
}

EngineCounters Engine::counters() const {
  std::lock_guard lock(mutex_);
  EngineCounters result = counters_;
  if (closed_) return result;
  return with_parts(with_request(std::move(result)));
}

// Counts that others keep.
EngineCounters Engine::with_parts(EngineCounters counted) const {
  counted.read = loader_->reader().counters();
  counted.part_read_bytes = loader_->part_bytes();
  if (ahead_) {
    counted.ahead_bytes = ahead_->counters().bytes;
    counted.decompress_ahead_seconds = ahead_->counters().seconds;
  }
  if (look_ahead_) counted.look_ahead = look_ahead_->counters();
  counted.verify_seconds = verifier_.seconds();
  if (replay_) counted.policy_changes = replay_->changes();
  if (const RowReader* rows = dense_->row_reader()) {
    for (size_t i = 0; i < kPartsMax; ++i) counted.part_read_bytes[i] += rows->part_bytes()[i];
    counted.verify_seconds += rows->verify_seconds();
  }
  counted.evictions = pool_memory_ ? pool_memory_->dropped() : cache_->evictions();
  if (pool_memory_) {
    counted.promotions = pool_memory_->promotions();
    counted.demotions = pool_memory_->demotions();
  }
  return counted;
}

// What the open request has added so far.
EngineCounters Engine::with_request(EngineCounters counted) const {
  if (!request_) return counted;
  counted.hits += request_->hits();
  counted.misses += request_->misses();
  counted.prefetched += request_->prefetched();
  counted.wait_seconds += request_->wait_seconds();
  if (pooled_request_ == nullptr) {
    counted.by_residency[static_cast<size_t>(Residency::both_chunks)] += request_->hits();
    counted.by_residency[static_cast<size_t>(Residency::miss)] += request_->misses();
    return counted;
  }
  for (size_t i = 0; i < counted.by_residency.size(); ++i) {
    counted.by_residency[i] += pooled_request_->by_residency()[i];
  }
  counted.decoded_bytes += pooled_request_->decoded_bytes();
  counted.decode_seconds += pooled_request_->decode_seconds();
  counted.ready_bytes += pooled_request_->ready_bytes();
  return counted;
}

}  // namespace zipmoe
