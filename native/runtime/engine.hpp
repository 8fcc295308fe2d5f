// The executor: owns the arena, the reader, the expert cache and the decoding threads. Knows records, extents, bytes;
// no model families. Calls are serialised; one request at a time.
#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "cache/arena.hpp"
#include "cache/expert_cache.hpp"
#include "cache/layer_pools.hpp"
#include "cache/policy_replay.hpp"
#include "cache/pool_memory.hpp"
#include "compute/expert_feed_forward.hpp"
#include "compute/expert_terms.hpp"
#include "compute/scratch_pool.hpp"
#include "io/reader_choice.hpp"
#include "runtime/dense_records.hpp"
#include "runtime/dense_steps.hpp"
#include "runtime/expert_request.hpp"
#include "runtime/pooled_request.hpp"
#include "runtime/record_loader.hpp"
#include "runtime/record_table.hpp"
#include "runtime/record_verifier.hpp"
#include "runtime/row_decoder.hpp"

namespace zipmoe {

// Experts in the pools F, C, S and E by what is in memory of them, instead of one pool of whole records.
struct EnginePools {
  std::vector<PoolClass> classes;
  std::vector<PoolGroup> groups;    // every expert is in one
  std::optional<double> tolerance;  // of the dispatch, in ranks; default: a tenth of the group's experts
  OrderKind read_order = OrderKind::cache_affinity;
};

// The host of a virtual machine finds memory for several threads at once; more than four measured no faster.
inline constexpr uint32_t kPopulateThreads = 4;

struct EngineOptions {
  VerifyMode verify = VerifyMode::always;
  uint32_t decode_threads = 1;
  InstructionSet instruction_set = InstructionSet::scalar;
  ReaderOptions reader;
  std::vector<SizeClass> size_classes;
  std::vector<uint32_t> class_of_record;    // ExpertCache::kNotCached: resident from the start (dense)
  std::vector<RecordIndex> rows_on_demand;  // dense records that are not resident: their rows are read when looked up
  bool keep_row_details = false;            // of these: see RowReader
  std::vector<uint64_t> scratch_bytes;      // one buffer each
  std::string eviction_policy = "zipmoe";   // one of eviction_policy_names()
  // With pools every group has a policy of its own: a step is one request then, and the seed is the first group's.
  PolicyParameters policy_parameters;
  // Instead of the policy and its half-life: they are chosen while the engine works (its steps are the model's).
  std::optional<ReplayOptions> policy_replay;
  uint32_t populate_threads = 0;     // that touch the pools' memory in the background before it is needed
  std::optional<EnginePools> pools;  // then there are no size classes, and the class of every expert is 0
};

// Row-major BF16 patterns [rows][columns].
struct BFloat16Rows {
  std::span<const uint16_t> values;
  uint64_t rows = 0;

  // Throws std::invalid_argument unless there are rows, all of the same length.
  uint64_t columns() const;
};

// Some rows of others, in any order, as often as wanted.
struct SelectedRows {
  BFloat16Rows from;
  std::span<const uint64_t> numbers;
};

// An expert, and which rows of the inputs are its own; any of them, as often as wanted.
struct ExpertRows {
  RecordIndex record = 0;
  std::span<const uint64_t> numbers;
};

// Which matrices of an expert's record are the feed-forward network's, and what lies between them.
struct ExpertNetwork {
  uint32_t first = 0;          // gate and up in one, or the gate, or, without a gate, up
  std::optional<uint32_t> up;  // where the gate is a matrix of its own
  uint32_t down = 0;
  GatedActivation activation;
};

struct EngineCounters {
  uint64_t hits = 0;
  uint64_t misses = 0;
  uint64_t prefetched = 0;  // requested experts whose reads had begun before: neither hits nor misses
  LookAheadCounters look_ahead;
  uint64_t evictions = 0;
  // Requested experts by what of them was in memory, in the order of Residency.
  std::array<uint64_t, kPools + 1> by_residency{};
  uint64_t promotions = 0;
  uint64_t demotions = 0;
  std::array<uint64_t, kPartsMax> part_read_bytes{};  // in the order of the codec's sections; dense records included
  uint64_t policy_changes = 0;                        // how often a replay has found another policy to be better
  uint64_t requests = 0;
  uint64_t decoded_bytes = 0;  // of BF16
  double decode_seconds = 0;
  double compute_seconds = 0;           // in multiply() and feed_forward()
  uint64_t ready_bytes = 0;             // of decoded_bytes: their exponents had been decompressed before
  uint64_t ahead_bytes = 0;             // exponents decompressed ahead
  double decompress_ahead_seconds = 0;  // for them, summed over threads
  double verify_seconds = 0;            // summed over the reader's threads
  double wait_seconds = 0;              // callers waiting for experts
  ReadCounters read;
};

class Engine {
 public:
  // Reserves and lays out the memory and opens the files; throws FileOpenError, UringUnavailable, std::system_error,
  // std::invalid_argument.
  Engine(RecordTable table, EngineOptions options);
  // The same with a reader of the caller's.
  Engine(RecordTable table, EngineOptions options, std::unique_ptr<Reader> reader);
  ~Engine();

  // Reads the dense records, some further at every call; throws RecordError.
  LoadProgress load_dense(std::chrono::milliseconds timeout);

  // Starts a request; throws std::logic_error if one is open. `tokens`: routed to each expert, or empty.
  void begin_request(std::vector<RecordIndex> records, HandOutOrder order, std::vector<uint32_t> tokens = {});
  RequestStep next_expert(std::chrono::milliseconds timeout);
  // Hands out all experts of the open request at once, until it ends, if all are in memory and nobody was handed out;
  // else none of them. Not with pools.
  bool take_all();
  // Ends the open request, if there is one.
  void end_request();
  // The same for a request that turned out not to be needed: it counts neither as a request nor as hits and misses, and
  // a replay does not hear of it. The policies of the pools do: when it began they had to say who makes room.
  void abandon_request();
  // Throws std::invalid_argument unless a request for exactly these records is open and has handed nobody out.
  void require_begun(std::span<const RecordIndex> records) const;

  // From now on that many slots of every size class are kept for predictions; throws std::logic_error with pools.
  void enable_look_ahead(uint32_t slots);
  // What the request after the present one, or after the next one if none is open, will probably ask for, the likeliest
  // first. Any request drops the predictions that are not its own. Ignored unless look-ahead is enabled.
  void predict(std::vector<RecordIndex> records);
  // What the next request will probably ask for, alike: reads begin at once. Ignored while a request is open. Returns
  // which of them, by position, nothing is in memory of. `pass`: it is the first of a pass like the last one, and if
  // that asked every layer for most of its experts, predict() may have begun reads for it: they go on.
  std::vector<size_t> predict_next(const std::vector<RecordIndex>& records, bool pass = false);
  // A pass that asks every layer for most of its experts is about to begin, the first one for these. Throws
  // std::logic_error if a request is open. Ignored unless look-ahead is enabled.
  void predict_sweep(std::vector<RecordIndex> records);

  // Decodes rows row_begin .. row_end - 1 of a matrix into a buffer of at least that many weights. The record must be
  // dense and loaded, or handed out by the open request.
  void decode(RecordIndex record, uint32_t matrix, uint64_t row_begin, uint64_t row_end, std::span<uint16_t> out);
  // The same for single rows of a dense matrix that is cut into `blocks` (records with one matrix each, of consecutive
  // rows): out [rows.size()][columns], in the given order.
  void gather(std::span<const RecordIndex> blocks, std::span<const int64_t> rows, std::span<uint16_t> out);

  // Computing on weights as they lie in memory (docs/compute.md), for codecs with fused kernels only; others throw
  // std::invalid_argument. Results do not depend on instruction set, threads, or the number of rows of x.
  //
  // out = x W^T (+ bias) for a dense matrix that is cut into `blocks` of consecutive rows: out BF16 [x.rows][rows].
  void multiply(std::span<const RecordIndex> blocks, const BFloat16Rows& x, std::span<const uint16_t> bias,
                std::span<uint16_t> out);
  // The feed-forward network of the expert that the open request handed out last: out BF16 [x.rows][rows of down].
  void feed_forward(RecordIndex record, const ExpertNetwork& network, const BFloat16Rows& x, std::span<uint16_t> out);
  // The same for some rows, which are gathered: out BF16 [x.numbers.size()][rows of down].
  void feed_forward(RecordIndex record, const ExpertNetwork& network, const SelectedRows& x, std::span<uint16_t> out);
  // The same for several experts that were handed out, each with rows of its own, and, if there is one, a dense network
  // on all rows: in two steps that the threads share, first matrices, then down; a dense network with another
  // activation first, alone. out BF16 [all experts' rows][rows of down], those of the first expert first; dense_out
  // BF16 [x.rows][rows of its down]. Throws std::invalid_argument for other shapes, std::logic_error for experts that
  // were not handed out.
  void feed_forward_jointly(std::span<const ExpertRows> experts, const ExpertNetwork& network, const BFloat16Rows& x,
                            std::span<uint16_t> out, const DenseNetwork* dense, std::span<uint16_t> dense_out);
  // The weighted sums of experts' outputs (ExpertTerms::combine).
  void combine(const ExpertTerms& terms, const uint16_t* outputs, uint64_t columns, uint16_t* out);
  // For the outputs of a request. Lives as long as the engine, closed or not.
  ScratchPool& output_memory() { return output_memory_; }

  // Parts of a decoder layer with dense matrices only. Results do not depend on the number of sequences either.
  //
  // Attention of as many new tokens of each of `sequences` as x.rows holds: one behind the cached ones, or several, a
  // prompt, behind none. Their keys and values are written to the cache. The output is that of the last `query_tokens`
  // of each sequence: out BF16 [sequences * query_tokens][rows of the output].
  void attention_step(const AttentionLayer& layer, const BFloat16Rows& x, uint64_t sequences, uint64_t query_tokens,
                      const RotaryPositions& positions, const KeyValueCache& cache, std::span<uint16_t> out);
  // A norm of many rows: out BF16, the shape of x.
  void normalise(const RmsNorm& norm, const BFloat16Rows& x, uint16_t* out);
  // A feed-forward network: out BF16 [x.rows][rows of down].
  void feed_forward_step(const DenseNetwork& network, const BFloat16Rows& x, std::span<uint16_t> out);

  // Where a matrix of the expert that was handed out last lies in the arena, if the expert is decoded (pool F). Valid
  // until the next one is asked for.
  std::optional<uint64_t> decoded_offset(RecordIndex record, uint32_t matrix) const;

  std::span<uint8_t> scratch(uint32_t index) const { return scratch_.at(index); }
  std::shared_ptr<Arena> arena() const { return arena_; }
  InstructionSet instruction_set() const { return options_.instruction_set; }

  // Between requests only; throws std::logic_error otherwise.
  void resize_pool(uint32_t size_class, uint32_t slots);
  // The same with pools: slots of each group, at most those at the beginning.
  void resize_pools(std::span<const PoolSlots> slots);
  std::vector<SizeClass> size_classes() const;
  std::vector<PoolSlots> pool_slots() const;      // by group; empty without pools
  std::vector<PoolSlots> pool_occupancy() const;  // experts in each
  // Arena memory of the dense records and the scratch buffers, rounding included.
  uint64_t fixed_bytes() const { return fixed_bytes_; }
  uint64_t pool_bytes() const;
  bool resident(RecordIndex record) const;  // nothing need be read to use it
  Residency residency(RecordIndex record) const;

  // The policy in force, in words.
  std::string policy() const;

  // Gives the memory back. Everything but the counters throws std::logic_error afterwards; idempotent.
  void close();

  EngineCounters counters() const;
  bool separable() const { return table_.codec().capabilities().separable; }
  std::string io_mode() const { return io_mode_; }
  std::string fallback_reason() const { return fallback_reason_; }
  IoBackend io_backend() const { return options_.reader.backend; }
  // What of io_uring the kernel refused.
  std::string uring_refusal() const { return uring_refusal_; }

 private:
  void require_open() const;
  void require_compute_threads() const;
  void require_handed_out(RecordIndex record) const;
  ReadRates measured_rates() const;
  void lay_out_pools(uint64_t offset);
  void open_policy_replay();
  void adopt_chosen_policy();
  void adopt_changed_policy();
  void replay_request(const std::vector<RecordIndex>& records);
  void resize_ghosts(uint32_t size_class);
  bool in_full_pool(RecordIndex record) const;
  EngineCounters with_parts(EngineCounters counted) const;
  EngineCounters with_request(EngineCounters counted) const;
  void account_request();
  void drop_request();
  void start_predicted();
  void require_experts(std::span<const RecordIndex> records) const;
  MatrixView readable_view(RecordIndex record, uint32_t matrix) const;
  template <typename Decode>
  void count_decoding(RecordIndex record, uint64_t weights, Decode decode);
  WeightMatrix weight_matrix(RecordIndex record, uint32_t matrix) const;
  std::vector<Projection> projections(const DenseProjection& dense, uint64_t columns) const;
  ExpertFeedForward expert_feed_forward(RecordIndex record, const ExpertNetwork& network, const TokenRows& x,
                                        uint64_t rows, std::span<uint16_t> out) const;
  ExpertFeedForward dense_feed_forward(const DenseNetwork& network, const BFloat16Rows& x,
                                       std::span<uint16_t> out) const;
  struct DenseProduct {
    const DenseProjection* matrix;
    uint16_t* out;     // BF16 [rows of x][columns]
    uint64_t columns;  // rows of the matrix
  };
  struct NetworkInputs {
    TokenRows rows;
    uint64_t count;
    uint64_t columns;
  };
  void feed_rows_forward(RecordIndex record, const ExpertNetwork& network, const NetworkInputs& x,
                         std::span<uint16_t> out);
  void mix_values(const AttentionLayer& layer, const ProjectedTokens& tokens, const RotaryPositions& positions,
                  const KeyValueCache& cache, uint16_t* out);
  void multiply_jointly(const BFloat16Rows& x, uint64_t columns, const std::vector<DenseProduct>& products,
                        const simd::GemvKernels& kernels);

  const RecordTable table_;
  const EngineOptions options_;
  const uint64_t fixed_bytes_;
  mutable std::mutex mutex_;
  std::shared_ptr<Arena> arena_;  // outlives the engine while somebody holds one of its buffers
  RecordVerifier verifier_;
  std::vector<std::span<uint8_t>> scratch_;
  std::unique_ptr<ExpertCache> cache_;  // without pools
  std::unique_ptr<RowDecoder> decoder_;
  std::unique_ptr<ComputeThreads> compute_threads_;  // of a codec with fused kernels
  std::unique_ptr<DecompressAhead> ahead_;           // with exponent buffers; before the loader, whose threads call it
  std::unique_ptr<DenseRecords> dense_;              // before the loader, which reads to there
  std::unique_ptr<RecordLoader> loader_;
  std::unique_ptr<PoolMemory> pool_memory_;            // instead of the cache
  std::vector<std::unique_ptr<LayerPools>> dispatch_;  // by group
  std::unique_ptr<PolicyReplay> replay_;               // where the policy is chosen by replay
  std::unique_ptr<LookAhead> look_ahead_;              // without pools, if it is enabled
  std::vector<RecordIndex> predicted_;                 // for the request after the next one
  std::unique_ptr<LayerRequest> request_;
  PooledRequest* pooled_request_ = nullptr;  // the same, if it is one
  std::optional<RecordIndex> handed_out_;
  std::vector<RecordIndex> requested_;  // by the request that is open, or was the last one
  bool handed_out_any_ = false;         // by it
  bool handed_out_all_ = false;         // at once
  EngineCounters counters_;
  ScratchPool output_memory_;
  std::string io_mode_;
  std::string fallback_reason_;
  std::string uring_refusal_;
  bool closed_ = false;
};

}  // namespace zipmoe
