"""``parquet:``: one column of text, a row a sample."""

from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

from autotune.corpus.sources.base import MAX_SAMPLE_BYTES, Reject, Slice, SourceFile, SourceOptions, UnusableFileError
from autotune.corpus.sources.base import whole as whole_file
from autotune.corpus.sources.lines import TOO_LONG

_ROWS_AT_ONCE = 1024
_BUFFER_BYTES = 2**20


class ParquetSource:
    """Parquet files. One is never cut: its parts are known only once it is read, which is left to a bounded child."""

    kind = "parquet"
    libraries: tuple[str, ...] = ("pyarrow",)
    example = "parquet:/data/corpus"

    def takes(self, path: Path, *, named: bool) -> bool:
        """By the file's name."""
        return named or path.suffix == ".parquet"

    def cut(self, file: SourceFile, options: SourceOptions) -> list[Slice]:
        """Never."""
        return whole_file(file)

    def samples(self, part: Slice, options: SourceOptions) -> Iterator[str | Reject]:
        """The column's values, a few rows in memory at a time."""
        import pyarrow

        # The default pool reserves more memory than it uses, which a limit cannot tell apart.
        pyarrow.set_memory_pool(pyarrow.system_memory_pool())
        try:
            yield from _rows(part, options.field)
        except (pyarrow.ArrowException, OSError) as error:
            raise UnusableFileError(f"damaged parquet: {error}") from error


def _rows(part: Slice, field: str) -> Iterator[str | Reject]:
    from pyarrow import parquet, types

    with parquet.ParquetFile(part.path, pre_buffer=False, buffer_size=_BUFFER_BYTES) as file:
        if field not in file.schema_arrow.names:
            names = ", ".join(repr(name) for name in file.schema_arrow.names[:5])
            raise UnusableFileError(f"has no column {field!r}, but {names}")
        kind = file.schema_arrow.field(field).type
        if not any(is_text(kind) for is_text in _text_kinds(types)):
            raise UnusableFileError(f"column {field!r} is {kind}, not text")
        row = 0
        for batch in file.iter_batches(batch_size=_ROWS_AT_ONCE, columns=[field], use_threads=False):
            for value in batch.column(0).to_pylist():
                reason = _why_not(value)
                if reason:
                    yield Reject(path=part.path, where=f"row {row}", reason=reason)
                elif value.strip():
                    yield value
                row += 1


def _text_kinds(types: ModuleType) -> tuple[Callable[[object], bool], ...]:
    return types.is_string, types.is_large_string, types.is_string_view, types.is_dictionary


def _why_not(value: object) -> str | None:
    if not isinstance(value, str):
        return "null" if value is None else f"{type(value).__name__}, not text"
    return TOO_LONG if len(value) > MAX_SAMPLE_BYTES or len(value.encode()) > MAX_SAMPLE_BYTES else None
