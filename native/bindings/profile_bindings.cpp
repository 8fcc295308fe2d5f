// Python face of the profiler's timed primitives. Times are taken inside, without the interpreter lock.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings/module.hpp"
#include "codec/library_versions.hpp"
#include "codec/planar.hpp"
#include "codec/registry.hpp"
#include "io/reader_choice.hpp"
#include "profiling/page_cache.hpp"
#include "profiling/timed_decoder.hpp"
#include "profiling/timed_reader.hpp"
#include "profiling/timed_reads.hpp"
#include "profiling/timed_work.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace zipmoe {
namespace {

using Bytes = nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Memory = nb::ndarray<uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Weights = nb::ndarray<uint16_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using MatrixTuple = std::tuple<uint64_t, uint64_t, std::vector<Bytes>, std::vector<uint32_t>>;

// Arrays of Python stay referenced for the duration of the call, so that spans into them are good.
template <typename NdArray>
auto span_of(const NdArray& array) {
  return std::span(array.data(), array.size());
}

IoMode parse_mode(const std::string& text) {
  if (text == "auto") return IoMode::automatic;
  if (text == "buffered") return IoMode::buffered;
  throw std::invalid_argument("the I/O mode must be auto or buffered, not " + text);
}

using PlaceTuples = std::vector<std::pair<uint32_t, uint64_t>>;

std::vector<BlockPlace> block_places(const PlaceTuples& places) {
  std::vector<BlockPlace> blocks;
  blocks.reserve(places.size());
  for (const auto& [file, offset] : places) blocks.push_back({file, offset});
  return blocks;
}

std::tuple<double, uint64_t, int> read_blocks(TimedReads& reads, const PlaceTuples& places, uint64_t block_bytes,
                                              const Memory& memory) {
  const std::vector<BlockPlace> blocks = block_places(places);
  nb::gil_scoped_release unlocked;
  const TimedReadResult result = reads.read(blocks, block_bytes, span_of(memory));
  return {result.seconds, result.bytes, result.error_number};
}

std::tuple<double, uint64_t, int> read_records(TimedReader& reader, const PlaceTuples& places, uint64_t length,
                                               const Memory& memory, bool checksums) {
  const std::vector<BlockPlace> blocks = block_places(places);
  nb::gil_scoped_release unlocked;
  const TimedReadResult result = reader.read(blocks, length, span_of(memory), checksums);
  return {result.seconds, result.bytes, result.error_number};
}

void init_timed_reader(TimedReader* self, const std::vector<std::string>& paths, const std::string& backend,
                       uint32_t parallel, uint64_t block_bytes, uint64_t least_block_bytes, uint32_t completion_threads,
                       const std::optional<Memory>& memory) {
  ReaderOptions options{.backend = parse_io_backend(backend)};
  options.threads.threads = parallel;
  options.threads.chunk_bytes = block_bytes;
  if (least_block_bytes > 0) options.threads.least_chunk_bytes = options.uring.least_block_bytes = least_block_bytes;
  options.uring.queue_depth = parallel;
  options.uring.block_bytes = block_bytes;
  options.uring.completion_threads = completion_threads;
  if (memory) options.uring.memory.push_back(span_of(*memory));
  nb::gil_scoped_release unlocked;
  new (self) TimedReader(open_reader(paths, options).reader);
}

double decompress(TimedWork& work, const std::string& codec, const std::vector<std::pair<Bytes, uint64_t>>& shards,
                  uint64_t units, const Memory& scratch) {
  const auto* planar = dynamic_cast<const PlanarCodec*>(&find_codec(codec));
  if (planar == nullptr) throw std::invalid_argument("codec " + codec + " has no E-chunks");
  std::vector<CompressedShard> spans;
  for (const auto& [compressed, raw_bytes] : shards) spans.push_back({span_of(compressed), raw_bytes});
  nb::gil_scoped_release unlocked;
  return work.decompress(*planar, spans, units, span_of(scratch));
}

double recombine_planes(TimedWork& work, const std::vector<std::pair<Bytes, Bytes>>& planes, uint64_t units,
                        const Memory& scratch) {
  std::vector<Planes> spans;
  for (const auto& [exponent, sign_mantissa] : planes) spans.push_back({span_of(exponent), span_of(sign_mantissa)});
  nb::gil_scoped_release unlocked;
  return work.recombine(spans, units, span_of(scratch), best_instruction_set());
}

double read_memory(TimedWork& work, const Bytes& memory, uint64_t units) {
  nb::gil_scoped_release unlocked;
  return work.read_memory(span_of(memory), units);
}

double copy_memory(TimedWork& work, const Bytes& source, const Memory& target, uint64_t units) {
  nb::gil_scoped_release unlocked;
  return work.copy_memory(span_of(source), span_of(target), units);
}

double decode_matrices(TimedDecoder& decoder, const std::vector<MatrixTuple>& matrices, uint64_t units,
                       const Weights& out) {
  std::vector<MatrixView> views;
  for (const auto& [rows, columns, sections, shard_bytes] : matrices) {
    MatrixView view{.shape = {rows, columns}, .sections = {}, .shard_bytes = shard_bytes};
    if (sections.empty() || sections.size() > view.sections.size()) {
      throw std::invalid_argument("a matrix has one or two sections");
    }
    for (size_t i = 0; i < sections.size(); ++i) view.sections[i] = span_of(sections[i]);
    views.push_back(view);
  }
  nb::gil_scoped_release unlocked;
  return decoder.decode(views, units, span_of(out));
}

}  // namespace

void bind_profile(nb::module_& module) {
  nb::class_<TimedReads>(module, "TimedReads", "Reads of equal length at a fixed queue depth, timed.")
      .def(
          "__init__",
          [](TimedReads* self, const std::vector<std::string>& paths, const std::string& mode, uint32_t depth) {
            new (self) TimedReads(paths, parse_mode(mode), depth);
          },
          "paths"_a, "mode"_a, "depth"_a, "mode: auto or buffered. OSError if a file cannot be opened.")
      .def_prop_ro("depth", &TimedReads::depth)
      .def_prop_ro("fallback_reason", &TimedReads::fallback_reason, "Why reads are not direct; empty if they are.")
      .def("read", read_blocks, "places"_a, "block_bytes"_a, "memory"_a.noconvert(),
           "Reads one block at each (file, offset) into memory (uint8 [>= depth * block_bytes], aligned to 4096), one "
           "block of it after the other, on from where the call before ended. Returns seconds, bytes, errno of the "
           "first failure (0: none).");
  nb::class_<TimedReader>(module, "TimedReader", "Whole records through one of the executor's backends, timed.")
      .def("__init__", init_timed_reader, "paths"_a, "backend"_a, nb::kw_only(), "parallel"_a, "block_bytes"_a,
           "least_block_bytes"_a = 0, "completion_threads"_a = 1, "memory"_a = nb::none(),
           "parallel: threads, or depth of the queue; block_bytes, least_block_bytes: of the longest and the shortest "
           "blocks (0: the default); memory: to be registered with io_uring. OSError if a file cannot "
           "be opened, RuntimeError without io_uring.")
      .def("read", read_records, "places"_a, "length"_a, "memory"_a.noconvert(), "checksums"_a,
           "Reads `length` bytes at each (file, offset), as many at a time as memory (uint8, aligned to 4096) holds. "
           "Returns seconds, bytes, errno of the first failure (0: none).");
  nb::class_<TimedWork>(module, "TimedWork", "Steps of a reconstruction on some workers; all functions return seconds.")
      .def(nb::init<uint32_t>(), "workers"_a)
      .def_prop_ro("workers", &TimedWork::workers)
      .def("decompress", decompress, "codec"_a, "shards"_a, "units"_a, "scratch"_a.noconvert(),
           "shards: (compressed, raw bytes); decompresses `units` of them.")
      .def("recombine", recombine_planes, "planes"_a, "units"_a, "scratch"_a.noconvert(),
           "planes: (exponents, sign-mantissa bytes); recombines `units` of them.")
      .def("read_memory", read_memory, "memory"_a.noconvert(), "units"_a, "Reads `units` MiB of memory.")
      .def("copy_memory", copy_memory, "source"_a.noconvert(), "target"_a.noconvert(), "units"_a,
           "Copies `units` MiB of memory.");
  nb::class_<TimedDecoder>(module, "TimedDecoder", "Whole matrices decoded by all workers together.")
      .def(
          "__init__",
          [](TimedDecoder* self, const std::string& codec, uint32_t workers) {
            new (self) TimedDecoder(find_codec(codec), best_instruction_set(), workers);
          },
          "codec"_a, "workers"_a)
      .def_prop_ro("workers", &TimedDecoder::workers)
      .def("decode", decode_matrices, "matrices"_a, "units"_a, "out"_a.noconvert(),
           "matrices: (rows, columns, sections, shard bytes); decodes `units` of them into out (uint16). Returns "
           "seconds.");
  module.def("uring_refusal", uring_refusal, "Why io_uring cannot be used by this process; empty if it can.");
  module.def("drop_cached_pages", drop_cached_pages, "path"_a, "ranges"_a,
             "Asks the kernel to drop the cached pages of (offset, length) ranges of a file.");
  module.def("cached_bytes", cached_bytes, "path"_a, "offset"_a, "length"_a,
             "Bytes of the range in the page cache, as far as the kernel tells this user.");
  module.def("library_version", library_version, "codec"_a,
             "Library and version that decode this codec; empty for codecs of ZipMoE's own.");
}

}  // namespace zipmoe
