// The instruction sets that the kernels exist for, and which of them this machine has.
#pragma once
#include <span>
#include <string_view>

namespace zipmoe {

enum class InstructionSet {
  scalar,  // portable C++ (x86-64-v2 on x86)
  avx2,    // x86-64-v3
  avx512,  // x86-64-v4 with VBMI and VBMI2
};

// Asked of the processor and the operating system once.
bool is_supported(InstructionSet instruction_set) noexcept;

// All supported ones, narrowest first.
std::span<const InstructionSet> supported_instruction_sets() noexcept;

InstructionSet best_instruction_set() noexcept;

// "scalar", "avx2", "avx512"
std::string_view name(InstructionSet instruction_set) noexcept;

// The inverse of name(). Throws std::invalid_argument for an unknown name or one that this machine does not have.
InstructionSet parse_instruction_set(std::string_view text);

}  // namespace zipmoe
