"""Reader of the files that W&B writes when it is offline."""

import struct
from collections.abc import Iterator
from typing import Any

_FILE_HEADER_BYTES = 7
_BLOCK_BYTES = 2**15
_PART_HEADER_BYTES = 7
_CHECKSUM_BYTES = 4
_WHOLE_RECORD = 1
_LAST_PART = 4
"""Type of a record's last part; ``_WHOLE_RECORD`` is that of an unsplit one."""


def records_of(content: bytes) -> Iterator[Any]:
    """Yield the records of a W&B file.

    After a header, the file is a log in LevelDB's format: blocks of 32 KiB, at whose
    ends records are split into parts. Each part begins with its own header: its
    checksum, size and type.
    """
    from wandb.proto.wandb_internal_pb2 import Record  # an optional dependency

    position = _FILE_HEADER_BYTES
    record_content = b""
    while position + _PART_HEADER_BYTES <= len(content):
        rest_of_block = _BLOCK_BYTES - position % _BLOCK_BYTES
        if rest_of_block < _PART_HEADER_BYTES:  # it is padding
            position += rest_of_block
            continue
        size, part_type = struct.unpack_from("<HB", content, position + _CHECKSUM_BYTES)
        begin = position + _PART_HEADER_BYTES
        record_content += content[begin : begin + size]
        position = begin + size
        if part_type in (_WHOLE_RECORD, _LAST_PART):
            record = Record()
            record.ParseFromString(record_content)
            yield record
            record_content = b""
