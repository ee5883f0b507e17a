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
from pathlib import Path

from capstone import CS_ARCH_X86, CS_MODE_64, Cs
from elftools.common.exceptions import ELFError
from elftools.elf.constants import SH_FLAGS
from elftools.elf.elffile import ELFFile

from autotune.corpus.sources.base import UnusableFileError

NEXT_TOKEN = "[NEXT]"
ADDRESS_TOKEN = "ADDR"
MIN_INSTRUCTIONS = 2
# The largest program of a common distribution has 95 MiB.
MAX_FILE_BYTES = 256 * 2**20
# Longer ranges are tables in executable sections, or damage. Also bounds the length of
# a line.
MAX_FUNCTION_BYTES = 2**20
_ADDRESS_FROM = 0x10000

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
_RELATIVE_TO_FIELD = 0x10
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
            elf = ELFFile(file)
            if (
                elf.elfclass != 64
                or not elf.little_endian
                or elf["e_machine"] != "EM_X86_64"
            ):
                raise UnusableFileError(
                    f"not x86-64 but {elf.elfclass}-bit {elf['e_machine']}"
                )
            if elf["e_type"] not in ("ET_EXEC", "ET_DYN"):
                raise UnusableFileError(f"not a linked program but {elf['e_type']}")
            held = [
                section
                for section in elf.iter_sections()
                if section["sh_type"] != "SHT_NOBITS"
            ]
            frames = [section for section in held if section.name == ".eh_frame"]
            code = [
                one
                for one in held
                if one["sh_flags"] & SH_FLAGS.SHF_EXECINSTR and one.name != ".eh_frame"
            ]
            code = [one for one in code if not one.name.startswith(".plt")]
            if not frames:
                raise UnusableFileError("no .eh_frame section with function bounds")
            if not code:
                raise UnusableFileError("no executable section")
            table, table_address = frames[-1].data(), frames[-1]["sh_addr"]
            sections = sorted(
                ((one["sh_addr"], one.data()) for one in code),
                key=lambda section: section[0],
            )
        except (ELFError, AssertionError) as error:
            # pyelftools asserts its assumptions about a file.
            raise UnusableFileError(f"corrupt ELF: {error}") from error
    disassembler = Cs(CS_ARCH_X86, CS_MODE_64)
    for address, size_bytes in function_ranges(table, table_address):
        content = _code_at(sections, address, size_bytes)
        parts, decoded_bytes = list[str](), 0
        for _, instruction_bytes, mnemonic, operands in disassembler.disasm_lite(
            content, address
        ):
            parts.append(instruction_text(mnemonic, operands))
            decoded_bytes += instruction_bytes
        if decoded_bytes == len(content) and len(parts) >= MIN_INSTRUCTIONS:
            yield " ".join(parts)


def _code_at(sections: list[tuple[int, bytes]], address: int, size_bytes: int) -> bytes:
    """Return the bytes of a range; none if it is not inside one executable section."""
    index = bisect_right(sections, address, key=lambda section: section[0]) - 1
    if index < 0 or not 0 < size_bytes <= MAX_FUNCTION_BYTES:
        return b""
    first, content = sections[index]
    begin = address - first
    return (
        content[begin : begin + size_bytes]
        if begin + size_bytes <= len(content)
        else b""
    )


# Cached, as instructions repeat often; bounded, as files may be hostile.
@functools.lru_cache(maxsize=2**16)
def instruction_text(mnemonic: str, operands: str) -> str:
    """Return the tokens of a disassembled instruction, ``[NEXT]`` included."""
    tokens = ["_".join(mnemonic.split())]
    if operands:
        # The last word: prefixes such as ``bnd`` and ``notrack`` come before it.
        name = mnemonic.rsplit(" ", 1)[-1]
        branches = name.startswith(("j", "loop")) or name in (
            "call",
            "lcall",
            "ljmp",
            "xbegin",
        )
        tokens += [_operand(operand, branches) for operand in operands.split(", ")]
    return " ".join([*tokens, NEXT_TOKEN])


def _operand(operand: str, branches: bool) -> str:
    if branches and _IMMEDIATE.fullmatch(operand):
        return ADDRESS_TOKEN
    fixed = _FROM_RIP.sub(f"rip+{ADDRESS_TOKEN}", operand)
    constants = _HEXADECIMAL.sub(
        lambda found: ADDRESS_TOKEN if int(found[0], 16) >= _ADDRESS_FROM else found[0],
        fixed,
    )
    return constants.replace(" ", "")


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
            body, end = position + 4, position + 4 + length
            if length == 0:
                # A terminator, which may be followed by more entries of joined tables.
                position = body
                continue
            # Also 0xFFFFFFFF, which announces a 64-bit length.
            if length < 4 or end > len(section):
                raise UnusableFileError(
                    f".eh_frame entry at {position:#x} has length {length:#x}"
                )
            (back,) = struct.unpack_from("<I", section, body)
            if back == 0:
                encodings[position] = _common_encoding(section[body + 4 : end])
            else:
                both, relative = encodings[body - back]
                address, size = both.unpack_from(section, body + 4)
                yield (address + relative * (section_address + body + 4)) % 2**64, size
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
            position += 1 + struct.calcsize(
                f"<{_POINTER_LETTERS[entry[position] & 0x0F]}"
            )
        elif letter == "L":
            position += 1
        elif letter not in "SB":
            break
    return _encoding(0)


def _encoding(code: int) -> _Encoding:
    letter, application = _POINTER_LETTERS.get(code & 0x0F), code & 0xF0
    if letter is None or application not in (0, _RELATIVE_TO_FIELD):
        raise UnusableFileError(f".eh_frame pointer encoding {code:#x} is unknown")
    # A range is a size, so it is unsigned even if the address is signed.
    return (
        struct.Struct(f"<{letter}{letter.upper()}"),
        application == _RELATIVE_TO_FIELD,
    )


def _after_leb(entry: bytes, position: int) -> int:
    """Return the position after a variable-length number (LEB128)."""
    for end in range(position, position + 10):  # enough for 64 bits
        if entry[end] < 0x80:
            return end + 1
    raise UnusableFileError(".eh_frame holds a number that is too long")
