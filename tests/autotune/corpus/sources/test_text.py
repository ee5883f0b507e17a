import gzip
import itertools

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from autotune.corpus.sources import base, lines, text
from autotune.corpus.sources.base import Reject, Slice, SourceOptions, UnusableFileError
from autotune.corpus.sources.text import TextSource

CONTENT = st.lists(
    st.sampled_from([b"a", b"bc", b"\n", b"\n\n", b"\r\n", b" ", b"\t\n", "é".encode(), b"\xff", b"\0"]), max_size=40
).map(b"".join)


def read(path, unit="line", begin=0, end=None):
    part = Slice(path=str(path), begin=begin, end=path.stat().st_size if end is None else end)
    return list(TextSource().samples(part, SourceOptions(unit=unit)))


def texts(found):
    return [one for one in found if isinstance(one, str)]


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(content=CONTENT, cuts=st.lists(st.integers(0, 60), max_size=4), unit=st.sampled_from(["line", "paragraph"]))
def test_slices_give_what_the_whole_file_gives_wherever_it_is_cut(tmp_path, content, cuts, unit):
    path = tmp_path / "file.txt"
    path.write_bytes(content)
    edges = [0, *sorted(min(cut, len(content)) for cut in cuts), len(content)]
    parts = [one for begin, end in itertools.pairwise(edges) for one in read(path, unit, begin, end)]
    assert parts == read(path, unit)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(content=CONTENT.filter(lambda content: b"\xff" not in content))
def test_lines_and_paragraphs_are_those_of_the_plain_definition(tmp_path, content):
    path = tmp_path / "file.txt"
    path.write_bytes(content)
    split = [line.rstrip(b"\r\n").decode() for line in content.split(b"\n")]
    assert texts(read(path)) == [line for line in split if line.strip()]
    paragraphs = []
    for line in split:
        if not line.strip():
            paragraphs.append([])
        elif paragraphs:
            paragraphs[-1].append(line)
        else:
            paragraphs = [[line]]
    assert texts(read(path, "paragraph")) == ["\n".join(lines) for lines in paragraphs if lines]


def test_a_file_is_one_sample(tmp_path):
    path = tmp_path / "file.txt"
    path.write_text("one\n\ntwo\n")
    assert read(path, "file") == ["one\n\ntwo\n"]


@pytest.mark.parametrize("unit", ["line", "paragraph", "file"])
def test_a_byte_order_mark_at_the_beginning_is_no_text(tmp_path, unit):
    path = tmp_path / "file.txt"
    path.write_bytes("\ufeffone \ufefftwo".encode())
    assert read(path, unit) == ["one \ufefftwo"]


@pytest.mark.parametrize("unit", ["line", "paragraph"])
def test_bad_utf_8_costs_its_sample_and_is_found_by_its_place(tmp_path, unit):
    path = tmp_path / "file.txt"
    path.write_bytes(b"good\n\nba\xffd\n\nfine\n")
    good, bad, fine = read(path, unit)
    assert (good, fine) == ("good", "fine")
    assert bad == Reject(path=str(path), where=f"{unit} at byte 6", reason="not UTF-8 at byte 8")


@pytest.mark.parametrize("unit", ["line", "paragraph", "file"])
def test_a_sample_that_is_too_long_is_refused_without_being_held(tmp_path, monkeypatch, unit):
    for module in (base, lines, text):
        if hasattr(module, "MAX_SAMPLE_BYTES"):
            monkeypatch.setattr(module, "MAX_SAMPLE_BYTES", 1000)
    path = tmp_path / "file.txt"
    path.write_bytes(b"a\n\n" + b"x" * 500_000 + b"\n\nb\n")
    found = read(path, unit)
    assert [one for one in found if isinstance(one, Reject)] == [
        Reject(path=str(path), where=f"{unit} at byte {0 if unit == 'file' else 3}", reason=lines.TOO_LONG)
    ]
    assert texts(found) == ([] if unit == "file" else ["a", "b"])


@pytest.mark.parametrize("unit", ["line", "paragraph", "file"])
def test_gzip_is_read_through(tmp_path, unit):
    plain, packed = tmp_path / "a.txt", tmp_path / "a.txt.gz"
    plain.write_text("one\ntwo\n\nthree\n")
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    assert read(packed, unit) == read(plain, unit)


@pytest.mark.parametrize(
    "damage", [lambda b: b[:-20], lambda b: b"\0" * 30 + b[30:], lambda b: b[:40] + b"\xff" * 9 + b[49:]]
)
def test_damaged_gzip_is_unusable(tmp_path, damage):
    packed = tmp_path / "a.gz"
    packed.write_bytes(damage(gzip.compress(bytes(range(256)) * 40)))
    with pytest.raises(UnusableFileError):
        read(packed)


def test_hidden_files_are_taken_only_by_name(tmp_path):
    (tmp_path / ".bashrc").write_text("alias")
    assert not TextSource().takes(tmp_path / ".bashrc", named=False)
    assert TextSource().takes(tmp_path / ".bashrc", named=True)
