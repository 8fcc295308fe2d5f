// Python face of the codecs: arrays in, arrays out; the interpreter lock is released while bytes are worked on.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <exception>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "bindings/module.hpp"
#include "codec/bfloat16_fields.hpp"
#include "codec/checksum.hpp"
#include "codec/registry.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace zipmoe {
namespace {

template <typename Element, int dimensions>
using Array = nb::ndarray<Element, nb::ndim<dimensions>, nb::c_contig, nb::device::cpu>;
using ByteArray = nb::ndarray<nb::numpy, uint8_t, nb::ndim<1>>;

struct CodecDescription {
  std::string name;
  bool separable;
  bool fused;
  std::vector<std::string> section_kinds;
  std::string unavailable_reason;
};

template <typename NdArray>
auto span_of(const NdArray& array) {
  return std::span(array.data(), array.size());
}

// A NumPy array that owns the bytes, without copying them.
ByteArray to_numpy(std::vector<uint8_t> bytes) {
  auto owned = std::make_unique<std::vector<uint8_t>>(std::move(bytes));
  uint8_t* data = owned->data();
  const size_t count = owned->size();
  nb::capsule owner(owned.get(), [](void* vector) noexcept { delete static_cast<std::vector<uint8_t>*>(vector); });
  (void)owned.release();  // the capsule's now
  return ByteArray(data, {count}, owner);
}

InstructionSet instruction_set_or_best(const std::string& text) {
  return text.empty() ? best_instruction_set() : parse_instruction_set(text);
}

std::vector<std::string> instruction_sets() {
  std::vector<std::string> names;
  for (InstructionSet each : supported_instruction_sets()) names.emplace_back(name(each));
  return names;
}

std::vector<CodecDescription> codecs() {
  std::vector<CodecDescription> descriptions;
  for (const Codec* codec : all_codecs()) {
    CodecDescription description;
    description.name = codec->name();
    description.separable = codec->capabilities().separable;
    description.fused = codec->capabilities().fused;
    for (SectionKind kind : codec->section_kinds()) description.section_kinds.emplace_back(name(kind));
    description.unavailable_reason = codec->unavailable_reason();
    descriptions.push_back(std::move(description));
  }
  return descriptions;
}

nb::tuple encode(const std::string& codec, const Array<const uint16_t, 2>& weights, int level, bool huffman_only,
                 uint32_t shards) {
  EncodedMatrix encoded;
  {
    nb::gil_scoped_release unlocked;
    encoded = find_codec(codec).encode(span_of(weights), {weights.shape(0), weights.shape(1)},
                                       {.level = level, .huffman_only = huffman_only, .shards = shards});
  }
  nb::list sections;
  for (EncodedSection& section : encoded.sections) {
    sections.append(nb::make_tuple(std::string(name(section.kind)), to_numpy(std::move(section.bytes))));
  }
  return nb::make_tuple(sections, encoded.shard_bytes);
}

MatrixView view(const Codec& codec, uint64_t rows, uint64_t columns,
                const std::vector<Array<const uint8_t, 1>>& sections, const std::vector<uint32_t>& shard_bytes) {
  if (sections.size() != codec.section_kinds().size()) {
    throw std::invalid_argument("codec " + std::string(codec.name()) + " has " +
                                std::to_string(codec.section_kinds().size()) + " sections, not " +
                                std::to_string(sections.size()));
  }
  MatrixView matrix{.shape = {rows, columns}, .sections = {}, .shard_bytes = shard_bytes};
  for (size_t i = 0; i < sections.size(); ++i) matrix.sections[i] = span_of(sections[i]);
  return matrix;
}

void validate(const std::string& codec, uint64_t rows, uint64_t columns,
              const std::vector<Array<const uint8_t, 1>>& sections, const std::vector<uint32_t>& shard_bytes) {
  const Codec& found = find_codec(codec);
  const MatrixView matrix = view(found, rows, columns, sections, shard_bytes);
  nb::gil_scoped_release unlocked;
  found.validate(matrix);
}

void decode(const std::string& codec, uint64_t rows, uint64_t columns,
            const std::vector<Array<const uint8_t, 1>>& sections, const std::vector<uint32_t>& shard_bytes,
            uint64_t row_begin, uint64_t row_end, Array<uint16_t, 2> out, const std::string& instruction_set) {
  const Codec& found = find_codec(codec);
  const MatrixView matrix = view(found, rows, columns, sections, shard_bytes);
  check_row_range(matrix.shape, row_begin, row_end);
  if (out.shape(0) != row_end - row_begin || out.shape(1) != columns) {
    throw std::invalid_argument("the output array must have shape (row_end - row_begin, columns)");
  }
  const InstructionSet chosen = instruction_set_or_best(instruction_set);
  nb::gil_scoped_release unlocked;
  found.decode_rows(matrix, row_begin, row_end, out.data(), chosen);
}

nb::tuple split_fields(const Array<const uint16_t, 1>& weights) {
  std::vector<uint8_t> exponent(weights.size());
  std::vector<uint8_t> sign_mantissa(weights.size());
  {
    nb::gil_scoped_release unlocked;
    split(span_of(weights), exponent, sign_mantissa);
  }
  return nb::make_tuple(to_numpy(std::move(exponent)), to_numpy(std::move(sign_mantissa)));
}

void recombine_fields(const Array<const uint8_t, 1>& exponent, const Array<const uint8_t, 1>& sign_mantissa,
                      Array<uint16_t, 1> out, const std::string& instruction_set) {
  const InstructionSet chosen = instruction_set_or_best(instruction_set);
  nb::gil_scoped_release unlocked;
  recombine(span_of(exponent), span_of(sign_mantissa), span_of(out), chosen);
}

uint64_t checksum(const Array<const uint8_t, 1>& bytes) {
  nb::gil_scoped_release unlocked;
  return xxh3_64(span_of(bytes));
}

}  // namespace

void bind_codecs(nb::module_& module) {
  nb::register_exception_translator([](const std::exception_ptr& pointer, void*) {
    try {
      std::rethrow_exception(pointer);
    } catch (const FormatError& error) {
      PyErr_SetString(PyExc_ValueError, error.what());
    }
  });

  nb::class_<CodecDescription>(module, "CodecDescription", "A codec of this build and what it can do")
      .def_ro("name", &CodecDescription::name)
      .def_ro("separable", &CodecDescription::separable)
      .def_ro("fused", &CodecDescription::fused)
      .def_ro("section_kinds", &CodecDescription::section_kinds)
      .def_ro("unavailable_reason", &CodecDescription::unavailable_reason, "Empty when the codec works in this build");

  module.def("instruction_sets", instruction_sets,
             "Instruction sets that this machine has kernels for, narrowest first");
  module.def(
      "best_instruction_set", [] { return std::string(name(best_instruction_set())); },
      "The widest of instruction_sets(), used where none is named");
  module.def("codecs", codecs, "All codecs, available or not");
  module.def("encode", encode, "codec"_a, "weights"_a.noconvert(), "level"_a = 0, "huffman_only"_a = false,
             "shards"_a = 1,
             "Encodes BF16 patterns (uint16 [rows, columns]); returns ([(section kind, uint8 bytes)], [bytes of each "
             "shard]). Raises ValueError for parameters that the codec cannot take.");
  module.def("validate", validate, "codec"_a, "rows"_a, "columns"_a, "sections"_a.noconvert(), "shard_bytes"_a,
             "Raises ValueError, saying what is wrong, unless the sections are an intact encoding of the shape.");
  module.def("decode", decode, "codec"_a, "rows"_a, "columns"_a, "sections"_a.noconvert(), "shard_bytes"_a,
             "row_begin"_a, "row_end"_a, "out"_a.noconvert(), "instruction_set"_a = "",
             "Decodes rows [row_begin, row_end) into out (uint16 [row_end - row_begin, columns]). Memory safe for any "
             "bytes; raises ValueError where they cannot be decoded.");
  module.def("split", split_fields, "weights"_a.noconvert(),
             "Splits BF16 patterns (uint16 [n]) into exponent and sign-mantissa bytes (uint8 [n] each).");
  module.def("recombine", recombine_fields, "exponent"_a.noconvert(), "sign_mantissa"_a.noconvert(),
             "out"_a.noconvert(), "instruction_set"_a = "", "The inverse of split, into out (uint16 [n]).");
  module.def("xxh3_64", checksum, "bytes"_a.noconvert(), "XXH3-64 checksum of a uint8 array.");
}

}  // namespace zipmoe
