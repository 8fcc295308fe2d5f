"""The extension runs on plain x86-64-v2: wide instructions occur only in the sections that are entered after a check.

native/simd/wide_code.hpp puts the code of the *_avx2 and *_avx512 units into sections of their own. Anything that the
compiler emits beside them, such as a template of a header that the linker merges with the baseline's copy, would be in
another section and is found here.
"""

from __future__ import annotations

import platform
import re
import shutil
import subprocess

import pytest

from zipmoe import _native

WIDE_SECTIONS = {"zipmoe_avx2", "zipmoe_avx512"}
# VEX and EVEX instructions start with v; the others belong to x86-64-v3 too (BMI1, BMI2, LZCNT, MOVBE).
BEYOND_V2 = re.compile(r"v\w+|andn|bextr|blsi|blsmsk|blsr|bzhi|mulx|pdep|pext|rorx|sarx|shlx|shrx|lzcnt|movbe")
NOT_WIDE = {"verr", "verw"}
INSTRUCTION = re.compile(r"^\s*[0-9a-f]+:\t(?:(?:rep|repz|repnz|lock|bnd|notrack|data16|cs|ds)\s+)*([a-z]\w*)(.*)$")

pytestmark = [
    pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="about x86 only"),
    pytest.mark.skipif(shutil.which("objdump") is None, reason="needs objdump"),
]


def beyond_v2_by_section() -> dict[str, list[str]]:
    """Every code section of the extension with its instructions that x86-64-v2 does not have."""
    listing = subprocess.run(
        ["objdump", "-d", "--no-show-raw-insn", _native.__file__], check=True, capture_output=True, text=True
    ).stdout
    found: dict[str, list[str]] = {}
    section = ""
    for line in listing.splitlines():
        if line.startswith("Disassembly of section"):
            section = line.split()[-1].rstrip(":")
            found[section] = []
            continue
        match = INSTRUCTION.match(line)
        if match is None:
            continue
        mnemonic, operands = match.groups()
        wide_register = "%ymm" in operands or "%zmm" in operands
        if wide_register or (BEYOND_V2.fullmatch(mnemonic) and mnemonic not in NOT_WIDE):
            found[section].append(line.strip())
    return found


def test_wide_instructions_stay_in_their_sections() -> None:
    found = beyond_v2_by_section()
    assert ".text" in found
    outside = {section: lines[:5] for section, lines in found.items() if lines and section not in WIDE_SECTIONS}
    assert outside == {}


def test_the_check_sees_wide_instructions() -> None:
    found = beyond_v2_by_section()
    assert any("%ymm" in line for line in found["zipmoe_avx2"])
    assert any("%zmm" in line for line in found["zipmoe_avx512"])
    assert not any("%zmm" in line or "%k1" in line for line in found["zipmoe_avx2"])
