"""Reader of the files that W&B writes when it is offline."""

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# A W&B file is a header, and then a log in LevelDB's format: blocks of 32 KiB, at whose
# ends records are split into parts. Each part begins with a header of its own: the
# part's checksum, size and type.
_FILE_HEADER_BYTES = 7
_BLOCK_BYTES = 2**15
_PART_HEADER_BYTES = 7
_CHECKSUM_BYTES = 4
_WHOLE_RECORD = 1
"""Type of a part that is a record of its own."""
_LAST_PART = 4
"""Type of the last part of a record that was split."""


def numbers_logged_to_wandb(directory: Path) -> dict[tuple[str, int], Any]:
    """Return the numbers in W&B's files of a run directory, by name and step.

    All files must belong to one W&B run.
    """
    numbers = {}
    run_ids = set()
    for path in sorted(directory.glob("wandb/offline-run-*/*.wandb")):
        for record in _records_of(path.read_bytes()):
            if record.WhichOneof("record_type") == "run":
                run_ids.add(record.run.run_id)
            for item in record.history.item:
                name = item.nested_key[0] if item.nested_key else item.key
                if not name.startswith("_"):  # such as the time, which W&B adds
                    step = record.history.step.num
                    numbers[name, step] = json.loads(item.value_json)
    assert len(run_ids) == 1
    return numbers


def _records_of(content: bytes) -> Iterator[Any]:
    """Yield the records of a W&B file."""
    from wandb.proto.wandb_internal_pb2 import Record  # an optional dependency

    position = _FILE_HEADER_BYTES
    record_content = b""
    while position + _PART_HEADER_BYTES <= len(content):
        rest_of_block_bytes = _BLOCK_BYTES - position % _BLOCK_BYTES
        if rest_of_block_bytes < _PART_HEADER_BYTES:  # it is padding
            position += rest_of_block_bytes
            continue
        size_bytes, part_type = struct.unpack_from(
            "<HB", content, position + _CHECKSUM_BYTES
        )
        begin = position + _PART_HEADER_BYTES
        position = begin + size_bytes
        record_content += content[begin:position]
        if part_type in (_WHOLE_RECORD, _LAST_PART):
            record = Record()
            record.ParseFromString(record_content)
            yield record
            record_content = b""
