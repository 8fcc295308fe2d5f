#include "simd/instruction_set.hpp"

#include <array>
#include <cstddef>
#include <stdexcept>
#include <string>

namespace zipmoe {
namespace {

constexpr std::array kAll = {InstructionSet::scalar, InstructionSet::avx2, InstructionSet::avx512};

bool detect(InstructionSet instruction_set) noexcept {
#if defined(__x86_64__)
  // These builtins also ask the operating system whether it saves the wide registers. The features must cover the
  // compiler flags that CMakeLists.txt gives to the translation units of the set.
  __builtin_cpu_init();
  switch (instruction_set) {
    case InstructionSet::scalar:
      return true;
    case InstructionSet::avx2:
      return __builtin_cpu_supports("x86-64-v3") != 0;
    case InstructionSet::avx512:
      return __builtin_cpu_supports("x86-64-v4") != 0 && __builtin_cpu_supports("avx512vbmi") != 0 &&
             __builtin_cpu_supports("avx512vbmi2") != 0;
  }
  return false;
#else
  return instruction_set == InstructionSet::scalar;
#endif
}

struct Detected {
  std::array<InstructionSet, kAll.size()> sets{};
  size_t count = 0;

  Detected() noexcept {
    for (InstructionSet each : kAll) {
      if (detect(each)) sets[count++] = each;
    }
  }
};

const Detected& detected() noexcept {
  static const Detected once;
  return once;
}

}  // namespace

std::span<const InstructionSet> supported_instruction_sets() noexcept {
  return std::span(detected().sets).first(detected().count);
}

bool is_supported(InstructionSet instruction_set) noexcept {
  for (InstructionSet each : supported_instruction_sets()) {
    if (each == instruction_set) return true;
  }
  return false;
}

InstructionSet best_instruction_set() noexcept { return supported_instruction_sets().back(); }

std::string_view name(InstructionSet instruction_set) noexcept {
  switch (instruction_set) {
    case InstructionSet::scalar:
      return "scalar";
    case InstructionSet::avx2:
      return "avx2";
    case InstructionSet::avx512:
      return "avx512";
  }
  return "unknown";
}

InstructionSet parse_instruction_set(std::string_view text) {
  for (InstructionSet each : kAll) {
    if (name(each) != text) continue;
    if (!is_supported(each)) throw std::invalid_argument("this machine has no " + std::string(text));
    return each;
  }
  throw std::invalid_argument("unknown instruction set '" + std::string(text) + "' (known: scalar, avx2, avx512)");
}

}  // namespace zipmoe
