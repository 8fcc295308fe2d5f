// Python face of the executor. Everything that may wait or compute runs without the GIL; waits are cut into slices so
// that Ctrl-C is honoured.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>
#include <unistd.h>

#include <array>
#include <cstdint>
#include <memory>
#include <new>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings/engine_arrays.hpp"
#include "bindings/engine_records.hpp"
#include "bindings/module.hpp"
#include "bindings/policy_candidates.hpp"
#include "bindings/process_bound_engine.hpp"
#include "compute/expert_terms.hpp"
#include "runtime/hand_out.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace zipmoe {
namespace {

using WeightBuffer = nb::ndarray<uint16_t, nb::c_contig, nb::device::cpu>;
using RowNumbers = nb::ndarray<const int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

void init_engine(ProcessBoundEngine* self, const RecordTable& table, const std::string& verify, uint32_t io_threads,
                 uint32_t io_depth, uint32_t decode_threads, const std::string& io_mode, const std::string& io_backend,
                 const std::string& instruction_set, const std::vector<std::pair<uint64_t, uint32_t>>& size_classes,
                 const std::vector<int64_t>& class_of_record, const std::vector<uint64_t>& scratch_bytes,
                 const std::string& policy, double half_life_steps, uint32_t requests_per_step, uint64_t seed,
                 const std::optional<PoolsTuple>& pools, std::vector<uint32_t> rows_on_demand, bool keep_row_details,
                 const CandidatePairs& candidates, uint32_t populate_threads) {
  EngineOptions options;
  if (!candidates.empty()) options.policy_replay.emplace().candidates = policy_candidates(candidates);
  options.rows_on_demand = std::move(rows_on_demand);
  options.keep_row_details = keep_row_details;
  options.populate_threads = populate_threads;
  options.verify = parse_verify_mode(verify);
  options.decode_threads = decode_threads;
  options.instruction_set = instruction_set.empty() ? best_instruction_set() : parse_instruction_set(instruction_set);
  options.reader.backend = parse_io_backend(io_backend);
  options.reader.mode = parse_io_mode(io_mode);
  options.reader.threads.threads = io_threads;
  options.reader.uring.queue_depth = io_depth;
  for (const auto& [slot_bytes, slots] : size_classes) options.size_classes.push_back({slot_bytes, 0, slots});
  for (const int64_t size_class : class_of_record) {
    if (size_class < 0) {
      options.class_of_record.push_back(ExpertCache::kNotCached);
      continue;
    }
    options.class_of_record.push_back(static_cast<uint32_t>(size_class));
    if (pools) continue;
    options.size_classes.at(static_cast<size_t>(size_class)).slot_limit += 1;
  }
  options.scratch_bytes = scratch_bytes;
  options.eviction_policy = policy;
  options.policy_parameters = {half_life_steps, requests_per_step, seed};
  if (pools) options.pools = pool_options(*pools);
  nb::gil_scoped_release release;
  new (self) ProcessBoundEngine(table, std::move(options));
}

// The next position of the open request; nothing when all experts were handed out.
std::optional<uint32_t> next_expert(const ProcessBoundEngine& self) {
  for (;;) {
    RequestStep step;
    {
      nb::gil_scoped_release release;
      step = self.get().next_expert(kWaitSlice);
    }
    if (step.kind == RequestStep::Kind::record) return step.position;
    if (step.kind == RequestStep::Kind::finished) return std::nullopt;
    check_signals();
  }
}

std::pair<uint64_t, uint64_t> load_dense(const ProcessBoundEngine& self) {
  LoadProgress progress;
  {
    nb::gil_scoped_release release;
    progress = self.get().load_dense(kWaitSlice);
  }
  check_signals();
  return {progress.bytes_done, progress.bytes_total};
}

void decode(const ProcessBoundEngine& self, uint32_t record, uint32_t matrix, uint64_t row_begin, uint64_t row_end,
            WeightBuffer out) {
  nb::gil_scoped_release release;
  self.get().decode(record, matrix, row_begin, row_end, {out.data(), out.size()});
}

// Into a scratch buffer, from its beginning.
void decode_to_scratch(const ProcessBoundEngine& self, uint32_t record, uint32_t matrix, uint64_t row_begin,
                       uint64_t row_end, uint32_t scratch) {
  nb::gil_scoped_release release;
  Engine& engine = self.get();
  const std::span<uint8_t> buffer = engine.scratch(scratch);
  engine.decode(record, matrix, row_begin, row_end,
                {reinterpret_cast<uint16_t*>(buffer.data()), buffer.size() / sizeof(uint16_t)});
}

void gather(const ProcessBoundEngine& self, const std::vector<uint32_t>& blocks, RowNumbers rows, WeightBuffer out) {
  nb::gil_scoped_release release;
  self.get().gather(blocks, {rows.data(), rows.size()}, {out.data(), out.size()});
}

void multiply(const ProcessBoundEngine& self, const std::vector<uint32_t>& blocks, Words2 x, OutWords2 out,
              const BiasWords& bias) {
  nb::gil_scoped_release release;
  const std::span<const uint16_t> biases = bias ? std::span(bias->data(), bias->size()) : std::span<const uint16_t>();
  self.get().multiply(blocks, rows_of(x), biases, {out.data(), out.size()});
}

void feed_forward(const ProcessBoundEngine& self, uint32_t record, const ExpertNetwork& network, Words2 x,
                  OutWords2 out) {
  nb::gil_scoped_release release;
  self.get().feed_forward(record, network, rows_of(x), {out.data(), out.size()});
}

// One request from its beginning to its end: compute(record, first row, rows) for each expert, in the order in which
// they become resident; the i-th has tokens[i] of the rows, behind those of the ones before. `begun`: begin_request()
// was called with these records and tokens before.
template <typename Compute>
void run_request(const ProcessBoundEngine& self, const std::vector<uint32_t>& records,
                 const std::vector<uint32_t>& tokens, uint64_t rows, bool begun, const Compute& compute) {
  if (tokens.size() != records.size()) throw std::invalid_argument("every expert needs its number of rows");
  std::vector<uint64_t> offsets{0};
  for (const uint32_t count : tokens) offsets.push_back(offsets.back() + count);
  if (rows == 0 || rows != offsets.back()) {
    throw std::invalid_argument("inputs and outputs have one row for every token of every expert");
  }
  nb::gil_scoped_release release;
  Engine& engine = self.get();
  if (!begun) engine.begin_request(records, HandOutOrder::as_available, tokens);
  const EndOfRequest ending(engine);
  if (begun) engine.require_begun(records);
  for_each_expert(engine, check_signals,
                  [&](uint32_t position) { compute(records[position], offsets[position], tokens[position]); });
}

void feed_forward_request(const ProcessBoundEngine& self, const std::vector<uint32_t>& records,
                          const std::vector<uint32_t>& tokens, const ExpertNetwork& network, Words2 x, OutWords2 out,
                          bool begun) {
  if (x.shape(0) != out.shape(0)) throw std::invalid_argument("inputs and outputs have the same number of rows");
  const uint64_t columns = x.shape(1);
  const uint64_t out_columns = out.shape(1);
  run_request(self, records, tokens, x.shape(0), begun, [&](uint32_t record, uint64_t first, uint64_t rows) {
    self.get().feed_forward(record, network, BFloat16Rows{{x.data() + first * columns, rows * columns}, rows},
                            {out.data() + first * out_columns, rows * out_columns});
  });
}

// The same for whole tokens: row t of x [tokens, hidden] goes to its top_k experts, and row t of out is the sum of
// their outputs, each times its weight. positions: of the flattened ids (tokens, top_k), those of records[0] first.
void sparse_step(const ProcessBoundEngine& self, const std::vector<uint32_t>& records,
                 const std::vector<uint32_t>& tokens, const ExpertNetwork& network, Words2 x,
                 const Positions& positions, const RoutingWeights& weights, OutWords2 out, bool begun) {
  const ExpertTerms terms{{weights.data(), weights.size()}, {positions.data(), positions.size()}, weights.shape(1)};
  if (weights.shape(0) != x.shape(0) || out.shape(0) != x.shape(0)) {
    throw std::invalid_argument("inputs, weights and outputs have one row for every token");
  }
  const uint64_t columns = out.shape(1);
  std::vector<uint64_t> tokens_of_rows;
  {
    nb::gil_scoped_release release;
    terms.check(x.shape(0), x.shape(1), columns);
    tokens_of_rows = terms.tokens_of_rows();
  }
  ScratchPool::Lease outputs(self.get().output_memory(), positions.size() * columns);
  run_request(self, records, tokens, positions.size(), begun, [&](uint32_t record, uint64_t first, uint64_t rows) {
    self.get().feed_forward(record, network, SelectedRows{rows_of(x), std::span(tokens_of_rows).subspan(first, rows)},
                            {outputs.values() + first * columns, rows * columns});
  });
  nb::gil_scoped_release release;
  self.get().combine(terms, outputs.values(), columns, out.data());
}

using ArenaArray = nb::ndarray<nb::numpy, uint16_t, nb::ndim<1>>;

// The array keeps the arena mapped, also after close(); it then reads as zeros.
ArenaArray arena_array(const ProcessBoundEngine& self, std::span<uint8_t> buffer) {
  auto arena = std::make_unique<std::shared_ptr<Arena>>(self.get().arena());
  nb::capsule owner(arena.get(), [](void* pointer) noexcept { delete static_cast<std::shared_ptr<Arena>*>(pointer); });
  arena.release();
  return ArenaArray(buffer.data(), {buffer.size() / sizeof(uint16_t)}, owner);
}

ArenaArray scratch(const ProcessBoundEngine& self, uint32_t index) {
  return arena_array(self, self.get().scratch(index));
}

ArenaArray whole_arena(const ProcessBoundEngine& self) {
  const std::shared_ptr<Arena> arena = self.get().arena();
  return arena_array(self, {arena->data(), arena->bytes()});
}

std::vector<SlotArray> slot_arrays(const std::vector<PoolSlots>& groups) {
  std::vector<SlotArray> result;
  for (const PoolSlots& slots : groups) result.push_back(slots.experts);
  return result;
}

void resize_pools(const ProcessBoundEngine& self, const std::vector<SlotArray>& slots) {
  nb::gil_scoped_release release;
  std::vector<PoolSlots> groups;
  for (const SlotArray& experts : slots) groups.push_back({experts});
  self.get().resize_pools(groups);
}

nb::dict counters(const ProcessBoundEngine& self) {
  EngineCounters counted;
  {
    nb::gil_scoped_release release;
    counted = self.get().counters();
  }
  nb::dict result;
  result["hits"] = counted.hits;
  result["misses"] = counted.misses;
  result["prefetched"] = counted.prefetched;
  result["predicted_reads"] = counted.look_ahead.predicted;
  result["prefetched_bytes"] = counted.look_ahead.used_bytes;
  result["wasted_reads"] = counted.look_ahead.wasted;
  result["wasted_bytes"] = counted.look_ahead.wasted_bytes;
  result["evictions"] = counted.evictions;
  result["full_hits"] = counted.by_residency[static_cast<size_t>(Residency::full)];
  result["compressed_hits"] = counted.by_residency[static_cast<size_t>(Residency::both_chunks)];
  result["sign_mantissa_hits"] = counted.by_residency[static_cast<size_t>(Residency::sign_mantissa)];
  result["exponent_hits"] = counted.by_residency[static_cast<size_t>(Residency::exponent)];
  result["promotions"] = counted.promotions;
  result["policy_changes"] = counted.policy_changes;
  result["demotions"] = counted.demotions;
  const bool separable = self.get().separable();
  result["exponent_read_bytes"] = separable ? counted.part_read_bytes[0] : 0;
  result["sign_mantissa_read_bytes"] = separable ? counted.part_read_bytes[1] : 0;
  result["requests"] = counted.requests;
  result["reads"] = counted.read.reads;
  result["read_bytes"] = counted.read.bytes;
  result["read_seconds"] = counted.read.busy_seconds;
  result["read_latency_seconds"] = counted.read.latency_seconds;
  result["longest_read_seconds"] = counted.read.longest_seconds;
  result["verify_seconds"] = counted.verify_seconds;
  result["wait_seconds"] = counted.wait_seconds;
  result["compute_seconds"] = counted.compute_seconds;
  result["decode_seconds"] = counted.decode_seconds;
  result["decoded_bytes"] = counted.decoded_bytes;
  result["ready_bytes"] = counted.ready_bytes;
  result["ahead_bytes"] = counted.ahead_bytes;
  result["decompress_ahead_seconds"] = counted.decompress_ahead_seconds;
  return result;
}

std::vector<std::pair<uint64_t, uint32_t>> size_classes(const ProcessBoundEngine& self) {
  std::vector<std::pair<uint64_t, uint32_t>> result;
  for (const SizeClass& shape : self.get().size_classes()) result.emplace_back(shape.slot_bytes, shape.slots);
  return result;
}

template <typename Call>
auto without_gil(Call call) {
  nb::gil_scoped_release release;
  return call();
}

}  // namespace

void bind_engine(nb::module_& module) {
  // Lives as long as the interpreter: the translator outlasts the module.
  static PyObject* record_error_type = PyErr_NewExceptionWithDoc(
      "zipmoe._native.RecordError", "A record could not be read: args are (fault, record index, message).", nullptr,
      nullptr);
  if (record_error_type == nullptr) throw nb::python_error();
  module.attr("RecordError") = nb::borrow(record_error_type);
  nb::register_exception_translator([](const std::exception_ptr& pointer, void*) {
    try {
      std::rethrow_exception(pointer);
    } catch (const RecordError& error) {
      const std::string fault(name(error.fault()));
      nb::tuple arguments = nb::make_tuple(fault, error.record(), error.what());
      PyErr_SetObject(record_error_type, arguments.ptr());
    } catch (const FileOpenError& error) {
      nb::tuple arguments = nb::make_tuple(error.error_number(), error.what());
      PyErr_SetObject(PyExc_OSError, arguments.ptr());
    }
  });

  nb::class_<RecordTable>(module, "RecordTable", "Files and records of one packed folder.")
      .def(nb::init<const std::string&>(), "codec"_a)
      .def("add_file", &RecordTable::add_file, "path"_a, "Returns the index of the file.")
      .def("add_record", &add_record, "name"_a, "file"_a, "offset"_a, "length"_a, "extents"_a, "matrices"_a,
           "extents: (offset, length, xxh3_64); matrices: (rows, columns, [(offset, length) per extent], shard bytes). "
           "Returns the index of the record; ValueError if the geometry contradicts itself.")
      .def(
          "rows_on_demand_bytes",
          [](const RecordTable& table, const std::vector<uint32_t>& records) {
            return RowReader::reserved_bytes(table, records);
          },
          "records"_a, "Memory that these records take at most when their rows are read on demand.")
      .def(
          "row_details_bytes",
          [](const RecordTable& table, const std::vector<uint32_t>& records) {
            return RowReader::details_bytes(table, records);
          },
          "records"_a, "Memory that they take besides if what nearly every row needs a little of stays there.")
      .def("__len__", &RecordTable::size);

  nb::class_<ExpertNetwork>(module, "ExpertNetwork",
                            "Positions of an expert's matrices in its record, and the activation between them.")
      .def(
          "__init__",
          [](ExpertNetwork* self, uint32_t first, uint32_t down, const GatedActivation& activation,
             std::optional<uint32_t> up) { new (self) ExpertNetwork{first, up, down, activation}; },
          "first"_a, "down"_a, "activation"_a, "up"_a = nb::none());

  nb::class_<ProcessBoundEngine>(module, "Engine", "Executor: arena, reads, expert cache, decoding threads.")
      .def(
          "__init__", &init_engine, "table"_a, nb::kw_only(), "verify"_a, "io_threads"_a, "io_depth"_a,
          "decode_threads"_a, "io_mode"_a, "io_backend"_a, "instruction_set"_a, "size_classes"_a, "class_of_record"_a,
          "scratch_bytes"_a, "policy"_a = EngineOptions{}.eviction_policy,
          "half_life_steps"_a = PolicyParameters{}.half_life_steps,
          "requests_per_step"_a = PolicyParameters{}.requests_per_step, "seed"_a = PolicyParameters{}.seed,
          "pools"_a = nb::none(), "rows_on_demand"_a = std::vector<uint32_t>(), "keep_row_details"_a = false,
          "candidates"_a = CandidatePairs(), "populate_threads"_a = kPopulateThreads,
          "size_classes: (slot bytes, slots); class_of_record: index of a class, -1 = dense. pools, instead of size "
          "classes: (classes: (F slot bytes, slot bytes of each part, staged experts, bytes and number of buffers for "
          "decompressed exponents), groups: (class, records, slots of F, C, S, E), tolerance of ranks or None, order "
          "of reads). rows_on_demand: dense records whose rows are read when they are looked up; keep_row_details: "
          "of these, what nearly every row needs a little of stays in memory. candidates: policies "
          "with their half-lives of which a replay chooses while the engine works, instead of policy and half-life. "
          "populate_threads: threads of the lowest priority that touch the pools' memory before it is needed; 0: none.")
      .def("load_dense", &load_dense, "Reads dense records for a while; returns (bytes done, bytes in all).")
      .def(
          "begin_request",
          [](const ProcessBoundEngine& self, std::vector<uint32_t> records, bool ascending,
             std::vector<uint32_t> tokens) {
            without_gil([&] {
              self.get().begin_request(std::move(records),
                                       ascending ? HandOutOrder::ascending : HandOutOrder::as_available,
                                       std::move(tokens));
            });
          },
          "records"_a, "ascending"_a, "tokens"_a = std::vector<uint32_t>(), "tokens: routed to each record, or none.")
      .def(
          "enable_look_ahead",
          [](const ProcessBoundEngine& self, uint32_t slots) {
            without_gil([&] { self.get().enable_look_ahead(slots); });
          },
          "slots"_a, "Keeps slots of every size class for records that predict() names.")
      .def(
          "predict",
          [](const ProcessBoundEngine& self, std::vector<uint32_t> records) {
            without_gil([&] { self.get().predict(std::move(records)); });
          },
          "records"_a, "What the request after the open one (or the next one) will probably ask for.")
      .def(
          "predict_next",
          [](const ProcessBoundEngine& self, const std::vector<uint32_t>& records, bool pass) {
            return without_gil([&] { return self.get().predict_next(records, pass); });
          },
          "records"_a, "of_pass"_a = false,
          "What the next request will probably ask for; returns the positions of those not in memory. of_pass: it "
          "begins "
          "a pass like the last one.")
      .def(
          "predict_sweep",
          [](const ProcessBoundEngine& self, std::vector<uint32_t> records) {
            without_gil([&] { self.get().predict_sweep(std::move(records)); });
          },
          "records"_a, "What the first request of a pass will ask for that is about to ask for most experts.")
      .def("next_expert", &next_expert, "Position of the next resident record in the request's list, or None.")
      .def("end_request", [](const ProcessBoundEngine& self) { without_gil([&] { self.get().end_request(); }); })
      .def(
          "abandon_request", [](const ProcessBoundEngine& self) { without_gil([&] { self.get().abandon_request(); }); },
          "Ends a request that is not needed after all: it is not counted.")
      .def("decode", &decode, "record"_a, "matrix"_a, "row_begin"_a, "row_end"_a, "out"_a)
      .def("decode_to_scratch", &decode_to_scratch, "record"_a, "matrix"_a, "row_begin"_a, "row_end"_a, "scratch"_a)
      .def("multiply", &multiply, "blocks"_a, "x"_a.noconvert(), "out"_a.noconvert(), "bias"_a.noconvert() = nb::none(),
           "out = x W^T (+ bias) on the packed dense matrix; BF16 patterns [tokens, columns], [tokens, rows].")
      .def("feed_forward", &feed_forward, "record"_a, "network"_a, "x"_a.noconvert(), "out"_a.noconvert(),
           "The network of the expert that was handed out last, on BF16 patterns [tokens, hidden].")
      .def("feed_forward_request", &feed_forward_request, "records"_a, "tokens"_a, "network"_a, "x"_a.noconvert(),
           "out"_a.noconvert(), "begun"_a = false,
           "A whole request: tokens[i] rows of x (BF16 patterns, in the order of the records) through each expert. "
           "begun: begin_request was called with them, as available, and nothing was handed out.")
      .def("sparse_step", &sparse_step, "records"_a, "tokens"_a, "network"_a, "x"_a.noconvert(),
           "positions"_a.noconvert(), "weights"_a.noconvert(), "out"_a.noconvert(), "begun"_a = false,
           "A whole request for tokens x (BF16 patterns [tokens, hidden]): out[t] is the sum over j of weights[t, j] "
           "(fp32) times the output of its expert j. positions (int64): in the flattened ids, expert after expert.")
      .def("gather", &gather, "blocks"_a, "rows"_a, "out"_a)
      .def("scratch", &scratch, "index"_a, "The scratch buffer as uint16 array, without copying.")
      .def(
          "resize_pool",
          [](const ProcessBoundEngine& self, uint32_t size_class, uint32_t slots) {
            without_gil([&] { self.get().resize_pool(size_class, slots); });
          },
          "size_class"_a, "slots"_a)
      .def("resize_pools", &resize_pools, "slots"_a, "Slots of F, C, S, E of each group.")
      .def_prop_ro("pool_slots", [](const ProcessBoundEngine& self) { return slot_arrays(self.get().pool_slots()); })
      .def_prop_ro("pool_occupancy",
                   [](const ProcessBoundEngine& self) { return slot_arrays(self.get().pool_occupancy()); })
      .def(
          "decoded_offset",
          [](const ProcessBoundEngine& self, uint32_t record, uint32_t matrix) {
            return self.get().decoded_offset(record, matrix);
          },
          "record"_a, "matrix"_a, "Byte offset in the arena of a matrix that is decoded (pool F), or None.")
      .def("arena", &whole_arena, "The arena as uint16 array, without copying; only what was committed may be read.")
      .def(
          "residency",
          [](const ProcessBoundEngine& self, uint32_t record) {
            return static_cast<uint32_t>(self.get().residency(record));
          },
          "record"_a, "0 (F), 1 (C), 2 (S), 3 (E) or 4 (M).")
      .def(
          "resident", [](const ProcessBoundEngine& self, uint32_t record) { return self.get().resident(record); },
          "record"_a)
      .def("counters", &counters)
      .def(
          "policy", [](const ProcessBoundEngine& self) { return self.get().policy(); }, "The one in force, in words.")
      .def_prop_ro("size_classes", &size_classes)
      .def_prop_ro("fixed_bytes", [](const ProcessBoundEngine& self) { return self.get().fixed_bytes(); })
      .def_prop_ro("pool_bytes", [](const ProcessBoundEngine& self) { return self.get().pool_bytes(); })
      .def_prop_ro("io_mode", [](const ProcessBoundEngine& self) { return self.get().io_mode(); })
      .def_prop_ro("fallback_reason", [](const ProcessBoundEngine& self) { return self.get().fallback_reason(); })
      .def_prop_ro("io_backend", [](const ProcessBoundEngine& self) { return name(self.get().io_backend()); })
      .def_prop_ro("uring_refusal", [](const ProcessBoundEngine& self) { return self.get().uring_refusal(); })
      .def("close", [](const ProcessBoundEngine& self) { without_gil([&] { self.get().close(); }); });
}

}  // namespace zipmoe
