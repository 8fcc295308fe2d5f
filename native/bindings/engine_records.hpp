// Records, pools and modes of an engine as Python names them.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "runtime/engine.hpp"

namespace zipmoe {

using ExtentTuple = std::tuple<uint64_t, uint64_t, uint64_t>;
using SectionPairs = std::vector<std::pair<uint64_t, uint64_t>>;
using MatrixTuple = std::tuple<uint64_t, uint64_t, SectionPairs, std::vector<uint32_t>>;
using SlotArray = std::array<uint32_t, kPools>;
using PoolClassTuple = std::tuple<uint64_t, std::vector<uint64_t>, uint32_t, uint64_t, uint32_t>;
using PoolGroupTuple = std::tuple<uint32_t, std::vector<uint32_t>, SlotArray>;
using PoolsTuple =
    std::tuple<std::vector<PoolClassTuple>, std::vector<PoolGroupTuple>, std::optional<double>, std::string>;

inline VerifyMode parse_verify_mode(const std::string& text) {
  if (text == "always") return VerifyMode::always;
  if (text == "first") return VerifyMode::first;
  if (text == "never") return VerifyMode::never;
  throw std::invalid_argument("verify must be always, first or never, not " + text);
}

inline IoMode parse_io_mode(const std::string& text) {
  if (text == "auto") return IoMode::automatic;
  if (text == "buffered") return IoMode::buffered;
  throw std::invalid_argument("the I/O mode must be auto or buffered, not " + text);
}

inline uint32_t add_record(RecordTable& table, std::string record_name, uint32_t file, uint64_t offset, uint64_t length,
                           const std::vector<ExtentTuple>& extents, const std::vector<MatrixTuple>& matrices) {
  Record record{std::move(record_name), file, offset, length, {}, {}};
  for (const auto& [extent_offset, extent_length, checksum] : extents) {
    record.extents.push_back({extent_offset, extent_length, checksum});
  }
  for (const auto& [rows, columns, sections, shard_bytes] : matrices) {
    RecordMatrix matrix{{rows, columns}, {}, shard_bytes};
    for (const auto& [section_offset, section_length] : sections) {
      matrix.sections.push_back({section_offset, section_length});
    }
    record.matrices.push_back(std::move(matrix));
  }
  return table.add_record(std::move(record));
}

inline EnginePools pool_options(const PoolsTuple& tuple) {
  const auto& [classes, groups, tolerance, read_order] = tuple;
  EnginePools options;
  for (const auto& [full_bytes, part_bytes, staging, exponent_bytes, exponent_buffers] : classes) {
    PoolClass shape{.full_bytes = full_bytes,
                    .part_bytes = {},
                    .staging = staging,
                    .exponent_bytes = exponent_bytes,
                    .exponent_buffers = exponent_buffers};
    for (size_t part = 0; part < part_bytes.size(); ++part) shape.part_bytes.at(part) = part_bytes[part];
    options.classes.push_back(shape);
  }
  for (const auto& [pool_class, experts, slots] : groups) {
    options.groups.push_back({.pool_class = pool_class, .experts = experts, .slots = {slots}});
  }
  options.tolerance = tolerance;
  options.read_order = parse_order_kind(read_order);
  return options;
}

}  // namespace zipmoe
