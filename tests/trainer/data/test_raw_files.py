"""A raw file that is passed as a dataset gets the commands that prepare it."""

import json
import os
import shlex
import subprocess

import pytest

from trainer.data.manifest import read_manifest
from trainer.data.raw_files import preparation_of
from trainer.errors import BadConfig

PREPARE = "autotune data prepare "


@pytest.mark.parametrize(
    ("name", "content", "source", "names"),
    [
        pytest.param("a.txt", b"a line", "text:{} ", "", id="text"),
        pytest.param("a", b"\x7fELF\x02", "elf:{} ", "", id="program"),
        pytest.param(
            "a.jsonl",
            b'{"n": 1, "review": "good"}',
            "jsonl:{} --field review ",
            "",
            id="one text field",
        ),
        pytest.param(
            "a.ndjson",
            b'{"title": "t", "n": 1, "doc": {"body": "b"}}',
            "jsonl:{} --field NAME ",
            "text fields of its first line: 'title', 'doc.body'",
            id="two text fields",
        ),
        pytest.param("a.json", b"{", "jsonl:{} --field NAME ", "", id="not JSON"),
        pytest.param("a.jsonl.gz", b"", "jsonl:{} --field NAME ", "", id="compressed"),
        pytest.param("a.json", b"[" * 99999, "jsonl:{dir}/a-lines", "", id="array"),
        pytest.param(
            "a.parquet", b"PAR1", "parquet:{} --field NAME ", "", id="parquet"
        ),
        pytest.param(
            "a.csv", b'"id",text\n', "jsonl:{dir}/a.jsonl", "'id', 'text'", id="csv"
        ),
        pytest.param("A.TSV", b"id\ttext\n", "jsonl:{dir}/", "'id', 'text'", id="tsv"),
    ],
)
def test_names_how_to_prepare_a_raw_file(tmp_path, name, content, source, names):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(BadConfig, match="is a raw file") as raised:
        read_manifest(path)
    step = raised.value.next_step
    assert PREPARE + source.format(path, dir=tmp_path) in step
    assert names in step


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a b.csv", 'text,n\n"one, two",1\nthree,2\n'),
        ("a.tsv", "text\tn\none, two\t1\nthree\t2\n"),
    ],
)
def test_suggested_conversion_writes_json_lines(tmp_path, name, content):
    path = tmp_path / name
    path.write_text(content)
    preparation = preparation_of(path)
    subprocess.run(["bash", "-c", preparation.conversion], check=True, cwd=tmp_path)
    lines = path.with_suffix(".jsonl").read_text().splitlines()
    assert [json.loads(line)["text"] for line in lines] == ["one, two", "three"]
    assert shlex.quote(preparation.source) in preparation.next_step()


def test_pipe_is_not_opened(tmp_path):
    os.mkfifo(tmp_path / "a.jsonl")
    assert preparation_of(tmp_path / "a.jsonl").field == "NAME"
