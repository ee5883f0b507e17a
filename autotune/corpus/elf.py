"""One ELF file to the token text of its functions.

A function is a line of tokens separated by single spaces. Each instruction gives its mnemonic (``rep_stosq`` for
``rep stosq``), one token per operand with the spaces inside it removed (``qwordptr[rbp-0x18]``), and then ``[NEXT]``.

Constants that depend on where a linker put things become ``ADDR``, because the same function in two programs must be
the same line, or duplicates survive and the vocabulary fills with numbers that occur once:

* the immediate target of a branch or call: ``call ADDR``;
* a displacement from ``rip``, whatever its size: ``qwordptr[rip+ADDR]``;
* every other constant of 0x10000 or more, which in code that is not position-independent may be an address. Large
  masks and seeds, which are not addresses, are lost with them: the bytes do not tell the two apart.

Bounds come from ``.eh_frame``. Left out are functions of one instruction, ranges outside executable sections, linkage
stubs (``.plt``: one entry covers all of them and is no function), and functions that do not decode to their last byte,
as a prefix would be a function that nobody wrote.

The file may be hostile. It may make this code slow, hungry, or raise anything: run it through ``bounded``.
"""

import functools
import re
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from capstone import CS_ARCH_X86, CS_MODE_64, Cs
from elftools.common.exceptions import ELFError
from elftools.elf.constants import SH_FLAGS
from elftools.elf.elffile import ELFFile

from autotune.corpus.eh_frame import DamagedFramesError, function_ranges
from autotune.corpus.sources.base import UnusableFileError

NEXT_TOKEN = "[NEXT]"
ADDRESS_TOKEN = "ADDR"
MIN_INSTRUCTIONS = 2
# The largest program of a common distribution has 95 MiB; more is an archive or a trap.
MAX_FILE_BYTES = 256 * 2**20
# Longer ranges are tables in executable sections, or damage. Also bounds the length of a line.
MAX_FUNCTION_BYTES = 2**20
_ADDRESS_FROM = 0x10000
# Distinct instructions repeat so often that a cache saves most of the string work; bounded, as files may be hostile.
_CACHED_INSTRUCTIONS = 2**16

_HEXADECIMAL = re.compile(r"0x[0-9a-f]+")
_FROM_RIP = re.compile(r"\brip(?: [+-] \w+)?")
_IMMEDIATE = re.compile(r"-?(?:0x[0-9a-f]+|\d+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Code:
    """An executable section."""

    address: int
    content: bytes


def functions(path: Path) -> Iterator[str]:
    """Yield the token text of each function, in the order of ``.eh_frame``.

    Raises:
        UnusableFileError: If the file is not ELF, not linked x86-64 code, or has no table of functions.
    """
    if path.stat().st_size > MAX_FILE_BYTES:
        raise UnusableFileError(f"larger than {MAX_FILE_BYTES // 2**20} MiB")
    with path.open("rb") as file:
        try:
            elf = ELFFile(file)
            _check_header(elf)
            frames, frames_address, sections = _read_sections(elf)
        except (ELFError, AssertionError) as error:
            # pyelftools asserts on what it takes for granted about a file.
            raise UnusableFileError(f"damaged ELF: {error}") from error
    disassembler = Cs(CS_ARCH_X86, CS_MODE_64)
    starts = [section.address for section in sections]
    try:
        for address, size_bytes in function_ranges(frames, frames_address):
            code = _code_at(sections, starts, address, size_bytes)
            text = _text(disassembler, code, address) if code else None
            if text is not None:
                yield text
    except DamagedFramesError as error:
        raise UnusableFileError(str(error)) from error


def _check_header(elf: ELFFile) -> None:
    if elf.elfclass != 64 or not elf.little_endian or elf["e_machine"] != "EM_X86_64":
        raise UnusableFileError(f"not x86-64 but {elf.elfclass}-bit {elf['e_machine']}")
    if elf["e_type"] not in ("ET_EXEC", "ET_DYN"):
        raise UnusableFileError(f"not a linked program but {elf['e_type']}")


def _read_sections(elf: ELFFile) -> tuple[bytes, int, list[_Code]]:
    """The frame table, its address, and the executable sections in the order of their addresses."""
    frames: bytes | None = None
    frames_address = 0
    sections: list[_Code] = []
    for section in elf.iter_sections():
        if section["sh_type"] == "SHT_NOBITS":
            continue
        if section.name == ".eh_frame":
            frames, frames_address = section.data(), section["sh_addr"]
        elif section["sh_flags"] & SH_FLAGS.SHF_EXECINSTR and not section.name.startswith(".plt"):
            sections.append(_Code(address=section["sh_addr"], content=section.data()))
    if frames is None:
        raise UnusableFileError("no .eh_frame section, so no function bounds")
    if not sections:
        raise UnusableFileError("no executable section")
    sections.sort(key=lambda code: code.address)
    return frames, frames_address, sections


def _code_at(sections: list[_Code], starts: list[int], address: int, size_bytes: int) -> bytes | None:
    """The bytes of a range, or None when it is not wholly inside one executable section."""
    index = bisect_right(starts, address) - 1
    if index < 0 or not 0 < size_bytes <= MAX_FUNCTION_BYTES:
        return None
    begin = address - sections[index].address
    content = sections[index].content
    return content[begin : begin + size_bytes] if begin + size_bytes <= len(content) else None


def _text(disassembler: Cs, code: bytes, address: int) -> str | None:
    parts: list[str] = []
    decoded_bytes = 0
    for _, size_bytes, mnemonic, operands in disassembler.disasm_lite(code, address):
        parts.append(instruction_text(mnemonic, operands))
        decoded_bytes += size_bytes
    if decoded_bytes != len(code) or len(parts) < MIN_INSTRUCTIONS:
        return None
    return " ".join(parts)


@functools.lru_cache(maxsize=_CACHED_INSTRUCTIONS)
def instruction_text(mnemonic: str, operands: str) -> str:
    """The tokens of one instruction as the disassembler prints it, ``[NEXT]`` included."""
    tokens = ["_".join(mnemonic.split())]
    if operands:
        branches = _is_branch(mnemonic)
        tokens += [_operand(operand, branches) for operand in operands.split(", ")]
    tokens.append(NEXT_TOKEN)
    return " ".join(tokens)


def _operand(operand: str, branches: bool) -> str:
    if branches and _IMMEDIATE.fullmatch(operand):
        return ADDRESS_TOKEN
    fixed = _FROM_RIP.sub(f"rip+{ADDRESS_TOKEN}", operand)
    return _HEXADECIMAL.sub(_constant, fixed).replace(" ", "")


def _constant(match: re.Match[str]) -> str:
    return ADDRESS_TOKEN if int(match[0], 16) >= _ADDRESS_FROM else match[0]


def _is_branch(mnemonic: str) -> bool:
    # The last word: prefixes such as ``bnd`` and ``notrack`` come before it.
    name = mnemonic.rsplit(" ", 1)[-1]
    return name.startswith(("j", "loop")) or name in ("call", "lcall", "ljmp", "xbegin")
