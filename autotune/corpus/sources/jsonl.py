"""``jsonl:``: one JSON object a line, of which one field is the sample."""

import json
from collections.abc import Iterator
from pathlib import Path

from autotune.corpus.sources.base import Reject, Slice, SourceFile, SourceOptions
from autotune.corpus.sources.lines import GZIP_SUFFIX, TOO_LONG, cut_lines, lines

_SUFFIXES = (".jsonl", ".ndjson", ".json")


class JsonlSource:
    """JSON lines, or gzip of them."""

    kind = "jsonl"
    libraries: tuple[str, ...] = ()
    example = "jsonl:/data/corpus.jsonl"

    def takes(self, path: Path, *, named: bool) -> bool:
        """By the file's name."""
        return named or path.name.removesuffix(GZIP_SUFFIX).endswith(_SUFFIXES)

    def cut(self, file: SourceFile, options: SourceOptions) -> list[Slice]:
        """By bytes."""
        return cut_lines(file)

    def samples(self, part: Slice, options: SourceOptions) -> Iterator[str | Reject]:
        """The field of every line; blank lines are skipped."""
        keys = options.field.split(".")
        for begin, line in lines(part):
            found = TOO_LONG if line is None else _field(line, keys)
            if isinstance(found, tuple):
                if found[0].strip():
                    yield found[0]
            elif found:
                yield Reject(path=part.path, where=f"line at byte {begin}", reason=found)


def _field(line: bytes, keys: list[str]) -> tuple[str] | str:
    """The text in a tuple, or else why there is none; empty for a blank line."""
    if not line.strip():
        return ""
    try:
        value = json.loads(line)
    except UnicodeDecodeError as error:
        return f"not UTF-8 at byte {error.start} of the line"
    except ValueError as error:
        return f"not JSON: {error}"
    except RecursionError:
        return "nested too deep"
    for key in keys:
        if not isinstance(value, dict) or key not in value:
            return f"has no field {'.'.join(keys)!r}"
        value = value[key]
    if not isinstance(value, str):
        return f"field {'.'.join(keys)!r} is {type(value).__name__}, not text"
    try:
        value.encode()
    except UnicodeEncodeError:
        return f"field {'.'.join(keys)!r} holds half a character"
    return (value,)
