import contextlib
import os
import struct
import subprocess
from pathlib import Path

import pytest
from elftools.dwarf.callframe import FDE
from elftools.elf.elffile import ELFFile
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from autotune.corpus.elf import function_ranges, functions, instruction_text
from autotune.corpus.sources import ELF_MAGIC
from autotune.corpus.sources.base import UnusableFileError


@pytest.mark.parametrize(
    ("mnemonic", "operands", "text"),
    [
        ("ret", "", "ret [NEXT]"),
        ("push", "rbp", "push rbp [NEXT]"),
        ("mov", "rax, qword ptr [rbp - 0x18]", "mov rax qwordptr[rbp-0x18] [NEXT]"),
        ("rep stosq", "qword ptr [rdi], rax", "rep_stosq qwordptr[rdi] rax [NEXT]"),
        ("call", "0x401136", "call ADDR [NEXT]"),
        ("jmp", "5", "jmp ADDR [NEXT]"),
        ("notrack jmp", "rax", "notrack_jmp rax [NEXT]"),
        ("bnd jmp", "0x1020", "bnd_jmp ADDR [NEXT]"),
        ("call", "qword ptr [rip + 0x2fe2]", "call qwordptr[rip+ADDR] [NEXT]"),
        ("lea", "rdi, [rip - 0x18e]", "lea rdi [rip+ADDR] [NEXT]"),
        ("mov", "eax, dword ptr [rip]", "mov eax dwordptr[rip+ADDR] [NEXT]"),
        ("add", "byte ptr [rip + 8], 1", "add byteptr[rip+ADDR] 1 [NEXT]"),
        ("mov", "edi, 0xffff", "mov edi 0xffff [NEXT]"),
        ("mov", "edi, 0x10000", "mov edi ADDR [NEXT]"),
        (
            "mov",
            "rax, qword ptr [rax*8 + 0x4a3c20]",
            "mov rax qwordptr[rax*8+ADDR] [NEXT]",
        ),
        ("mov", "rax, qword ptr fs:[0x28]", "mov rax qwordptrfs:[0x28] [NEXT]"),
    ],
)
def test_position_dependent_constants_become_placeholders(mnemonic, operands, text):
    assert instruction_text(mnemonic, operands) == text


def test_equal_functions_become_equal_lines(first_program, second_program):
    first = set(functions(first_program))
    second = set(functions(second_program))
    both = first & second
    # helper and shared, with a global and a call at other addresses in each.
    assert any("call ADDR" in line and "0x1234" in line for line in both)
    assert any("rip+ADDR" in line and "call" not in line for line in both)
    assert first != second


def test_stripping_changes_nothing(first_program, tmp_path):
    stripped = tmp_path / "stripped"
    subprocess.run(["strip", "-o", stripped, first_program], check=True)
    assert stripped.stat().st_size < first_program.stat().st_size
    assert list(functions(stripped)) == list(functions(first_program))


def test_reads_position_dependent_code(compile_c):
    code = "void nothing(void) {} int main(int argc, char **argv) { return argc * 5; }"
    lines = set(functions(compile_c(code, "-no-pie", "-fcf-protection=none")))
    assert any(line.count("[NEXT]") >= 2 for line in lines)
    assert "ret [NEXT]" not in lines


def test_undecodable_function_is_left_out(compile_c):
    # 0x06 (push es) does not exist in 64-bit mode.
    broken = (
        'int broken(int x) { __asm__("mov $0x7777, %eax\\n.byte 0x06"); return x; }'
    )
    program = compile_c(
        broken + " int main(int argc, char **argv) { return broken(argc); }"
    )
    assert not any("0x7777" in line for line in functions(program))


def test_rejects_unusable_programs(first_program, compile_c, tmp_path):
    def refusal(path):
        with pytest.raises(UnusableFileError) as error:
            list(functions(path))
        return str(error.value)

    assert "not a linked program" in refusal(
        compile_c("int f(int x) { return x; }", "-c")
    )
    program = first_program.read_bytes()
    path = tmp_path / "file"
    subprocess.run(["objcopy", "-R", ".eh_frame", first_program, path], check=True)
    assert ".eh_frame" in refusal(path)
    path.write_bytes(program[:18] + (183).to_bytes(2, "little") + program[20:])
    assert "not x86-64 but 64-bit EM_AARCH64" in refusal(path)
    for content in (
        b"",
        b"plain text",
        ELF_MAGIC,
        ELF_MAGIC + b"\x02\x01\x01" + bytes(60),
    ):
        path.write_bytes(content)
        assert refusal(path)
    os.truncate(path, 2**40)
    assert "larger than 256 MiB" in refusal(path)


def frames_of(program: Path) -> tuple[bytes, int]:
    with program.open("rb") as file:
        section = ELFFile(file).get_section_by_name(".eh_frame")
        return section.data(), section["sh_addr"]


def test_ranges_match_pyelftools(first_program):
    with first_program.open("rb") as file:
        entries = (
            ELFFile(file).get_dwarf_info(relocate_dwarf_sections=False).EH_CFI_entries()
        )
        headers = [entry.header for entry in entries if isinstance(entry, FDE)]
    truth = [(header.initial_location, header.address_range) for header in headers]
    assert list(function_ranges(*frames_of(first_program))) == truth


def test_reads_encoding_behind_a_personality():
    common = (
        bytes(4)
        + b"\x01zPLR\x00"
        + b"\x01\x78\x10\x07"
        + b"\x03"
        + bytes(4)
        + b"\x1b\x1b"
    )
    entry = struct.pack("<IiI", len(common) + 8, 0x100, 0x20)
    section = (
        struct.pack("<I", len(common)) + common + struct.pack("<I", len(entry)) + entry
    )
    # Relative to the position of the address itself.
    assert list(function_ranges(section, 0x1000)) == [
        (0x1000 + len(common) + 12 + 0x100, 0x20)
    ]


def test_empty_section_has_no_functions():
    assert list(function_ranges(bytes(8), 0)) == list(function_ranges(b"", 0)) == []


@pytest.mark.parametrize(
    "section",
    [
        b"\xff\xff\xff\xff" + bytes(16),
        b"\x02\x00\x00\x00\x00\x00",
        b"\x10\x00\x00\x00" + bytes(4),
        b"\x10\x00\x00\x00\x09" + bytes(15),
        b"\x08\x00\x00\x00" + bytes(4) + b"\x09" + bytes(3),
        b"\x08\x00\x00\x00" + bytes(4) + b"\x01eh\x00",
        b"\x14\x00\x00\x00" + bytes(4) + b"\x01zR\x00" + b"\xff" * 12,
    ],
    ids=[
        "64-bit",
        "shorter than its id",
        "past the end",
        "no such CIE",
        "version",
        "augmentation",
        "endless number",
    ],
)
def test_malformed_section_is_named(section):
    with pytest.raises(UnusableFileError, match=r"\.eh_frame"):
        list(function_ranges(section, 0x1000))


@settings(
    max_examples=200,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
def test_damaged_table_raises_only_its_error(first_program, data):
    section, address = frames_of(first_program)
    corrupt = bytearray(section)
    changes = st.tuples(st.integers(0, len(section) - 1), st.integers(0, 255))
    for position, value in data.draw(st.lists(changes, max_size=8)):
        corrupt[position] = value
    ranges = []
    with contextlib.suppress(UnusableFileError):
        ranges.extend(function_ranges(bytes(corrupt), address))
    # Every entry takes at least its length and id, so damage cannot multiply them.
    assert len(ranges) <= len(section) // 8
    assert all(0 <= first < 2**64 and size >= 0 for first, size in ranges)
