// Marks for the functions of the *_avx2.cpp and *_avx512.cpp translation units.
//
// Everything compiled with wide instructions is put into an ELF section of its own, and tests/codecs/test_wide_code.py
// checks that no other section of the extension contains such an instruction. What the compiler emits without the mark
// (a template or inline function of a header that the linker could merge with the baseline's copy) lands in .text and
// fails that test. These translation units therefore include no C++ standard headers and mark every function.
#pragma once

#define ZIPMOE_AVX2_CODE __attribute__((section("zipmoe_avx2")))
#define ZIPMOE_AVX512_CODE __attribute__((section("zipmoe_avx512")))
