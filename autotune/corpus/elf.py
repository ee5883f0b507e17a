"""Extraction of the functions of an ELF file as token text.

A function is a line of tokens separated by single spaces. Each instruction gives its
mnemonic (``rep_stosq`` for ``rep stosq``), one token per operand with the spaces inside
it removed (``qwordptr[rbp-0x18]``), and then ``[NEXT]``.

Constants that may be addresses become ``ADDR``, so that the same function in two
programs is the same line: otherwise duplicates survive and the vocabulary fills with
numbers that occur once.

* the immediate target of a branch or call: ``call ADDR``;
* a displacement from ``rip``, whatever its size: ``qwordptr[rip+ADDR]``;
* every other constant of 0x10000 or more, which may be an address in code that is not
  position-independent. Large masks and seeds are lost with them, as the bytes do not
  distinguish the two.

Bounds come from ``.eh_frame``, which exception handling needs at run time, so that it
survives ``strip``. Only the two addresses of each entry are read; every read is
checked, and the loop always advances. Left out are functions of one instruction, ranges
outside executable sections, linkage stubs (``.plt``, one entry for all of them), and
functions that do not decode to their last byte.

A hostile file may make this code slow, use much memory, or raise anything. Run it
through ``bounded``.
"""

import functools
import re
import struct
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from capstone import CS_ARCH_X86, CS_MODE_64, Cs
from elftools.common.exceptions import ELFError
from elftools.elf.constants import SH_FLAGS
from elftools.elf.elffile import ELFFile

from autotune.corpus.sources.base import UnusableFileError

NEXT_TOKEN = "[NEXT]"
"""Token at the end of each instruction."""
ADDRESS_TOKEN = "ADDR"
"""Token in the place of a constant that may be an address."""
MIN_INSTRUCTIONS = 2
"""Fewest instructions of a function."""
MAX_FILE_BYTES = 256 * 2**20
"""Largest file; the largest program of a common distribution has 95 MiB."""
MAX_FUNCTION_BYTES = 2**20
"""Longest function. Longer ranges are tables in executable sections, or damage. This
also bounds the length of a line."""
_ADDRESS_FROM = 0x10000
"""Smallest constant that may be an address."""

_HEXADECIMAL = re.compile(r"0x[0-9a-f]+")
_FROM_RIP = re.compile(r"\brip(?: [+-] \w+)?")
_IMMEDIATE = re.compile(r"-?(?:0x[0-9a-f]+|\d+)")

_POINTER_LETTERS = {
    0x00: "Q",
    0x02: "H",
    0x03: "I",
    0x04: "Q",
    0x0A: "h",
    0x0B: "i",
    0x0C: "q",
}
"""Letter of ``struct`` for each format of a pointer."""
_RELATIVE_TO_FIELD = 0x10
"""Flag of pointers that are relative to their own position."""
_BRANCHES = ("call", "lcall", "ljmp", "xbegin")
"""Names of branches that do not begin with ``j`` or ``loop``."""
_Encoding = tuple[struct.Struct, bool]
"""Format of an entry's address and size, and True if the address is relative to its own
position."""


def functions(path: Path) -> Iterator[str]:
    """Yield each function's text.

    Raises:
        UnusableFileError: Unless it is an x86-64 program with an ``.eh_frame``.
    """
    if path.stat().st_size > MAX_FILE_BYTES:
        raise UnusableFileError(f"larger than {MAX_FILE_BYTES // 2**20} MiB")
    with path.open("rb") as file:
        try:
            frames, code = _read_sections(ELFFile(file))
        except (ELFError, AssertionError) as error:
            # pyelftools asserts its assumptions about a file.
            raise UnusableFileError(f"corrupt ELF: {error}") from error
    disassembler = Cs(CS_ARCH_X86, CS_MODE_64)
    for address, size_bytes in function_ranges(frames.content, frames.address):
        content = _code_at(code, address, size_bytes)
        instructions: list[str] = []
        decoded_bytes = 0
        for _, instruction_bytes, mnemonic, operands in disassembler.disasm_lite(
            content, address
        ):
            instructions.append(instruction_text(mnemonic, operands))
            decoded_bytes += instruction_bytes
        if decoded_bytes == len(content) and len(instructions) >= MIN_INSTRUCTIONS:
            yield " ".join(instructions)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Section:
    """A section of a program in memory."""

    address: int
    content: bytes


def _read_sections(elf: ELFFile) -> tuple[_Section, list[_Section]]:
    """Return the section with function bounds, and those with code by address.

    Raises:
        UnusableFileError: Unless it is an x86-64 program with such sections.
    """
    is_64_bit = elf.elfclass == 64 and elf.little_endian
    if not is_64_bit or elf["e_machine"] != "EM_X86_64":
        raise UnusableFileError(f"not x86-64 but {elf.elfclass}-bit {elf['e_machine']}")
    if elf["e_type"] not in ("ET_EXEC", "ET_DYN"):
        raise UnusableFileError(f"not a linked program but {elf['e_type']}")
    frames = []
    code = []
    for section in elf.iter_sections():
        if section["sh_type"] == "SHT_NOBITS":
            continue
        is_code = section["sh_flags"] & SH_FLAGS.SHF_EXECINSTR
        if section.name == ".eh_frame":
            frames.append(section)
        elif is_code and not section.name.startswith(".plt"):
            code.append(section)
    if not frames:
        raise UnusableFileError("no .eh_frame section with function bounds")
    if not code:
        raise UnusableFileError("no executable section")
    bounds = _Section(address=frames[-1]["sh_addr"], content=frames[-1].data())
    sections = [
        _Section(address=section["sh_addr"], content=section.data()) for section in code
    ]
    sections.sort(key=lambda section: section.address)
    return bounds, sections


def _code_at(sections: list[_Section], address: int, size_bytes: int) -> bytes:
    """Return the bytes of a range; none if it is not inside one executable section."""
    index = bisect_right(sections, address, key=lambda section: section.address) - 1
    if index < 0 or not 0 < size_bytes <= MAX_FUNCTION_BYTES:
        return b""
    section = sections[index]
    begin = address - section.address
    end = begin + size_bytes
    if end > len(section.content):
        return b""
    return section.content[begin:end]


# Cached, as instructions repeat often; bounded, as files may be hostile.
@functools.lru_cache(maxsize=2**16)
def instruction_text(mnemonic: str, operands: str) -> str:
    """Return the tokens of a disassembled instruction, ``[NEXT]`` included."""
    tokens = ["_".join(mnemonic.split())]
    if operands:
        # The last word: prefixes such as ``bnd`` and ``notrack`` come before it.
        name = mnemonic.rsplit(" ", 1)[-1]
        is_branch = name.startswith(("j", "loop")) or name in _BRANCHES
        tokens += [_operand(operand, is_branch) for operand in operands.split(", ")]
    return " ".join([*tokens, NEXT_TOKEN])


def _operand(operand: str, is_branch: bool) -> str:
    """Return the token of an operand, without addresses."""
    if is_branch and _IMMEDIATE.fullmatch(operand):
        return ADDRESS_TOKEN
    text = _FROM_RIP.sub(f"rip+{ADDRESS_TOKEN}", operand)
    text = _HEXADECIMAL.sub(_constant, text)
    return text.replace(" ", "")


def _constant(match: re.Match[str]) -> str:
    """Return a constant, or the token of an address if it may be one."""
    return ADDRESS_TOKEN if int(match[0], 16) >= _ADDRESS_FROM else match[0]


def function_ranges(section: bytes, section_address: int) -> Iterator[tuple[int, int]]:
    """Yield (first address, size in bytes) for every entry of an ``.eh_frame``.

    The section is little-endian and 64-bit, and its order is kept. Layout: Linux
    Standard Base Core 5.0, "Exception Frames" (refspecs.linuxfoundation.org).

    Args:
        section: Bytes of the section.
        section_address: Virtual address of the section's first byte.

    Raises:
        UnusableFileError: If the bytes are not such a table. Ranges before the damage
            were already yielded.
    """
    encodings: dict[int, _Encoding] = {}
    position = 0
    try:
        while position + 4 <= len(section):
            (length,) = struct.unpack_from("<I", section, position)
            body = position + 4
            end = body + length
            if length == 0:
                # A terminator, which may be followed by more entries of joined tables.
                position = body
                continue
            # Also 0xFFFFFFFF, which announces a 64-bit length.
            if length < 4 or end > len(section):
                raise UnusableFileError(
                    f".eh_frame entry at {position:#x} has length {length:#x}"
                )
            # Distance back to the common entry; 0 marks a common entry itself.
            (back,) = struct.unpack_from("<I", section, body)
            fields = body + 4
            if back == 0:
                encodings[position] = _common_encoding(section[fields:end])
            else:
                address_and_size, is_relative = encodings[body - back]
                address, size = address_and_size.unpack_from(section, fields)
                if is_relative:
                    address += section_address + fields
                yield address % 2**64, size
            position = end
    except (struct.error, IndexError, KeyError) as error:
        raise UnusableFileError(
            f".eh_frame entry at {position:#x} is corrupt"
        ) from error


def _common_encoding(entry: bytes) -> _Encoding:
    """Read the address encoding from a common entry (CIE), the part after its id."""
    version = entry[0]
    if version not in (1, 3):
        raise UnusableFileError(f".eh_frame version {version} is unknown")
    augmentation = entry[1:].partition(b"\0")[0]
    if not augmentation:
        return _encoding(0)
    if not augmentation.startswith(b"z"):
        raise UnusableFileError(
            f".eh_frame augmentation {augmentation[:8]!r} is unknown"
        )
    position = len(augmentation) + 2
    # Alignment factors of code and data, the return register (one byte in version 1),
    # and the augmentation's length.
    for _ in range(2):
        position = _after_leb(entry, position)
    position = position + 1 if version == 1 else _after_leb(entry, position)
    position = _after_leb(entry, position)
    for letter in augmentation[1:].decode("latin1"):
        if letter == "R":
            return _encoding(entry[position])
        if letter == "P":
            letter_of_pointer = _POINTER_LETTERS[entry[position] & 0x0F]
            position += 1 + struct.calcsize(f"<{letter_of_pointer}")
        elif letter == "L":
            position += 1
        elif letter not in "SB":
            break
    return _encoding(0)


def _encoding(code: int) -> _Encoding:
    """Return the encoding with a code: its format in four bits, then its flags."""
    letter = _POINTER_LETTERS.get(code & 0x0F)
    application = code & 0xF0
    if letter is None or application not in (0, _RELATIVE_TO_FIELD):
        raise UnusableFileError(f".eh_frame pointer encoding {code:#x} is unknown")
    # A range is a size, so it is unsigned even if the address is signed.
    address_and_size = struct.Struct(f"<{letter}{letter.upper()}")
    return address_and_size, application == _RELATIVE_TO_FIELD


def _after_leb(entry: bytes, position: int) -> int:
    """Return the position after a variable-length number (LEB128)."""
    for end in range(position, position + 10):  # enough for 64 bits
        if entry[end] < 0x80:
            return end + 1
    raise UnusableFileError(".eh_frame holds a number that is too long")
