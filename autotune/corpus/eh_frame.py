"""Where functions begin and end, read from an ``.eh_frame`` section. Pure: bytes in, address ranges out.

Exception handling needs this table at run time, so it survives ``strip``. Only the two addresses of each entry are
read; the unwind instructions between them, which are most of the work of a general reader, are skipped. Layout: Linux
Standard Base Core 5.0, "Exception Frames" (refspecs.linuxfoundation.org).

Nothing here trusts the bytes: every read is checked, and the loop always moves forward.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass

_EXTENDED_LENGTH = 0xFFFFFFFF
_POINTER_FORMATS = {
    0x00: struct.Struct("<Q"),
    0x02: struct.Struct("<H"),
    0x03: struct.Struct("<I"),
    0x04: struct.Struct("<Q"),
    0x0A: struct.Struct("<h"),
    0x0B: struct.Struct("<i"),
    0x0C: struct.Struct("<q"),
}
# A range is a size, so it is read without a sign whatever the sign of the address beside it.
_RANGE_FORMATS = {2: struct.Struct("<H"), 4: struct.Struct("<I"), 8: struct.Struct("<Q")}
_RELATIVE_TO_FIELD = 0x10
_ADDRESS_MASK = 2**64 - 1
_MAX_LEB_BYTES = 10


class DamagedFramesError(ValueError):
    """The section is not a well-formed ``.eh_frame``, or uses a form that x86-64 linkers do not write."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Encoding:
    """How an entry's addresses are written."""

    address: struct.Struct
    size: struct.Struct
    relative: bool


def function_ranges(section: bytes, section_address: int) -> Iterator[tuple[int, int]]:
    """Yield (first address, size in bytes) for every entry, in the section's order.

    Args:
        section: The content of ``.eh_frame`` of a little-endian 64-bit file.
        section_address: The virtual address of its first byte.

    Raises:
        DamagedFramesError: If the bytes are not such a table; ranges before the damage were already given.
    """
    encodings: dict[int, _Encoding] = {}
    position = 0
    try:
        while position + 4 <= len(section):
            (length,) = struct.unpack_from("<I", section, position)
            body, end = position + 4, position + 4 + length
            if length == 0:
                # A terminator; linkers that joined several tables leave more entries behind one.
                position = body
                continue
            if length == _EXTENDED_LENGTH or length < 4 or end > len(section):
                raise DamagedFramesError(f".eh_frame entry at {position:#x} has length {length:#x}")
            (back,) = struct.unpack_from("<I", section, body)
            if back == 0:
                encodings[position] = _common_encoding(section[body + 4 : end])
            else:
                yield _range(section, section_address, body + 4, encodings[body - back])
            position = end
    except (struct.error, IndexError, KeyError) as error:
        raise DamagedFramesError(f".eh_frame entry at {position:#x} is damaged") from error


def _range(section: bytes, section_address: int, position: int, encoding: _Encoding) -> tuple[int, int]:
    (address,) = encoding.address.unpack_from(section, position)
    (size,) = encoding.size.unpack_from(section, position + encoding.address.size)
    if encoding.relative:
        address += section_address + position
    return address & _ADDRESS_MASK, size


def _common_encoding(entry: bytes) -> _Encoding:
    """Read the address encoding from a common entry (CIE), the part after its id."""
    version = entry[0]
    if version not in (1, 3):
        raise DamagedFramesError(f".eh_frame version {version} is unknown")
    augmentation_end = entry.index(0, 1) if 0 in entry[1:] else len(entry)
    augmentation = entry[1:augmentation_end]
    if not augmentation:
        return _encoding(0)
    if not augmentation.startswith(b"z"):
        raise DamagedFramesError(f".eh_frame augmentation {augmentation[:8]!r} is unknown")
    position = augmentation_end + 1
    # Alignment factors of code and data, the return register (one byte in version 1), and the augmentation's length.
    for _ in range(2):
        position = _after_leb(entry, position)
    position = position + 1 if version == 1 else _after_leb(entry, position)
    position = _after_leb(entry, position)
    for letter in augmentation[1:].decode("latin1"):
        if letter == "R":
            return _encoding(entry[position])
        if letter == "P":
            position += 1 + _pointer_format(entry[position]).size
        elif letter == "L":
            position += 1
        elif letter not in "SB":
            break
    return _encoding(0)


def _encoding(code: int) -> _Encoding:
    application = code & 0xF0
    if application not in (0, _RELATIVE_TO_FIELD):
        raise DamagedFramesError(f".eh_frame pointer encoding {code:#x} is unknown")
    address = _pointer_format(code)
    return _Encoding(address=address, size=_RANGE_FORMATS[address.size], relative=application == _RELATIVE_TO_FIELD)


def _pointer_format(code: int) -> struct.Struct:
    pointer = _POINTER_FORMATS.get(code & 0x0F)
    if pointer is None:
        raise DamagedFramesError(f".eh_frame pointer encoding {code:#x} is unknown")
    return pointer


def _after_leb(entry: bytes, position: int) -> int:
    """The position behind a variable-length number."""
    for end in range(position, position + _MAX_LEB_BYTES):
        if entry[end] < 0x80:
            return end + 1
    raise DamagedFramesError(".eh_frame holds a number that is too long")
