import os

import pyarrow
import pytest
from pyarrow import parquet

from autotune.corpus.extract import extract_partition
from autotune.corpus.sources.base import Partition, Reject, Slice, SourceOptions, UnusableFileError
from autotune.corpus.sources.parquet import ParquetSource


def read(path, field="text"):
    part = Slice(path=str(path), begin=0, end=path.stat().st_size)
    return list(ParquetSource().samples(part, SourceOptions(field=field)))


@pytest.mark.parametrize(
    "kind",
    [
        pyarrow.string(),
        pyarrow.large_string(),
        pyarrow.string_view(),
        pyarrow.dictionary(pyarrow.int32(), pyarrow.string()),
    ],
)
def test_the_column_is_read_in_order_over_all_row_groups(tmp_path, kind):
    texts = [f"text {number}" for number in range(3000)]
    path = tmp_path / "a.parquet"
    column = pyarrow.array(texts).cast(kind)
    parquet.write_table(pyarrow.table({"text": column, "n": range(3000)}), path, row_group_size=700)
    assert read(path) == texts


def test_nulls_are_rejected_by_row_and_blank_texts_skipped(tmp_path):
    path = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.table({"text": ["a", None, " ", "b"]}), path)
    assert read(path) == ["a", Reject(path=str(path), where="row 1", reason="null"), "b"]


def test_a_column_that_is_missing_or_no_text_makes_the_file_unusable(tmp_path):
    path = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.table({"n": [1, 2]}), path)
    with pytest.raises(UnusableFileError, match="no column 'text', but 'n'"):
        read(path)
    with pytest.raises(UnusableFileError, match="is int64, not text"):
        read(path, "n")


@pytest.mark.parametrize("damage", [lambda b: b[:-30], lambda b: b"", lambda b: b[:100] + os.urandom(200) + b[300:]])
def test_a_damaged_file_costs_one_reject_in_its_bounded_child(tmp_path, damage):
    good, bad = tmp_path / "good.parquet", tmp_path / "bad.parquet"
    parquet.write_table(pyarrow.table({"text": [f"some text {n}" for n in range(200)]}), good, compression="snappy")
    bad.write_bytes(damage(good.read_bytes()))
    (tmp_path / "out").mkdir()
    slices = tuple(Slice(path=str(path), begin=0, end=path.stat().st_size) for path in (bad, good))
    result = extract_partition(Partition(kind="parquet", slices=slices), SourceOptions(), tmp_path / "out")
    assert result.rejected == 1
    assert sum(result.samples) == 200
