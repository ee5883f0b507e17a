"""A raw file that is passed as a dataset gets the commands that prepare it."""

import json
import os
import shlex
import subprocess
from dataclasses import dataclass

import pytest

from trainer.formats.errors import BadConfig
from trainer.formats.manifest import read_manifest
from trainer.formats.raw_files import preparation_of


@dataclass(frozen=True, kw_only=True)
class RawFile:
    """A file that is no dataset, and what the next step of its error must name."""

    name: str
    content: bytes
    source: str
    """Argument of ``autotune data prepare``, with ``{path}`` for the path of the file
    and ``{directory}`` for its directory."""
    field: str | None = None
    """Argument of ``--field``; None if the next step must not have this option."""
    field_choices: str | None = None
    """Names among which you choose a field; None if there is no choice."""


@pytest.mark.parametrize(
    "raw_file",
    [
        pytest.param(
            RawFile(name="a.txt", content=b"a line", source="text:{path}"), id="text"
        ),
        pytest.param(
            RawFile(name="a", content=b"\x7fELF\x02", source="elf:{path}"),
            id="program",
        ),
        pytest.param(
            RawFile(
                name="a.jsonl",
                content=b'{"n": 1, "review": "good"}',
                source="jsonl:{path}",
                field="review",
            ),
            id="one text field",
        ),
        pytest.param(
            RawFile(
                name="a.ndjson",
                content=b'{"title": "t", "n": 1, "doc": {"body": "b"}}',
                source="jsonl:{path}",
                field="NAME",
                field_choices="text fields of its first line: 'title', 'doc.body'",
            ),
            id="two text fields",
        ),
        pytest.param(
            RawFile(name="a.json", content=b"{", source="jsonl:{path}", field="NAME"),
            id="not JSON",
        ),
        pytest.param(
            RawFile(
                name="a.jsonl.gz", content=b"", source="jsonl:{path}", field="NAME"
            ),
            id="compressed",
        ),
        pytest.param(
            RawFile(
                name="a.json",
                content=b'[{"text": "one"}]',
                source="jsonl:{directory}/a-lines.jsonl",
                field="NAME",
            ),
            id="JSON array",
        ),
        pytest.param(
            RawFile(
                name="a.json",
                content=b'{"a":' * 99_999,
                source="jsonl:{path}",
                field="NAME",
            ),
            id="nested too deeply to parse",
        ),
        pytest.param(
            RawFile(
                name="a.parquet",
                content=b"PAR1",
                source="parquet:{path}",
                field="NAME",
            ),
            id="parquet",
        ),
        pytest.param(
            RawFile(
                name="a.csv",
                content=b'"id",text\n',
                source="jsonl:{directory}/a.jsonl",
                field="NAME",
                field_choices="'id', 'text'",
            ),
            id="csv",
        ),
        pytest.param(
            RawFile(
                name="A.TSV",
                content=b"id\ttext\n",
                source="jsonl:{directory}/A.jsonl",
                field="NAME",
                field_choices="'id', 'text'",
            ),
            id="tsv",
        ),
    ],
)
def test_error_names_the_command_for_a_raw_file(tmp_path, raw_file):
    path = tmp_path / raw_file.name
    path.write_bytes(raw_file.content)
    with pytest.raises(BadConfig, match="is a raw file") as rejected:
        read_manifest(path)
    next_step = rejected.value.next_step
    source = raw_file.source.format(path=path, directory=tmp_path)
    command = f"autotune data prepare {source}"
    if raw_file.field is not None:
        command += f" --field {raw_file.field}"
    assert f"{command} --out DIR" in next_step
    if raw_file.field_choices is None:
        assert "fields" not in next_step
    else:
        assert raw_file.field_choices in next_step


@pytest.mark.parametrize(
    ("name", "content"),
    [
        pytest.param(
            "a b.csv", 'text,n\n"one, two",1\nthree,2\n', id="csv, space in its name"
        ),
        pytest.param("a.tsv", "text\tn\none, two\t1\nthree\t2\n", id="tsv"),
    ],
)
def test_suggested_conversion_writes_json_lines(tmp_path, name, content):
    path = tmp_path / name
    path.write_text(content)
    preparation = preparation_of(path)
    assert preparation.conversion is not None
    subprocess.run(["bash", "-c", preparation.conversion], check=True, cwd=tmp_path)
    lines = path.with_suffix(".jsonl").read_text().splitlines()
    assert [json.loads(line)["text"] for line in lines] == ["one, two", "three"]
    assert shlex.quote(preparation.source) in preparation.next_step()


def test_pipe_is_not_opened(tmp_path):
    path = tmp_path / "a.jsonl"
    os.mkfifo(path)
    # Opening a pipe without a writer would wait without end.
    assert preparation_of(path).field == "NAME"
