import pytest

from benchmarks.structure import (
    ARCHITECTURE,
    CARRIES,
    ROOT,
    Sources,
    stations_of,
    wrong_stations,
)

WORDS = {
    "micro_batch_size": "micro_batch_size",
    "num_workers": "num_workers",
    "term": "[Tt]erm",
}
PAGE = "<!-- stations of x -->\n\n| file | what happens |\n|---|---|\n{}\n<!-- end -->"


def test_the_stations_of_values_are_files_that_know_them_or_carry_them():
    page = (ROOT / ARCHITECTURE).read_text()
    assert set(stations_of(page)) == set(WORDS)
    assert list(wrong_stations(page, WORDS)) == []


@pytest.mark.parametrize(
    ("rows", "wrong"),
    [
        (["a.py", "a.py"], "x comes back to a.py"),
        (["b.py"], "x: b.py does not exist"),
        (["c.py"], "x: c.py does not name it"),
    ],
)
def test_a_station_that_is_wrong_is_named(tmp_path, rows, wrong):
    (tmp_path / "a.py").write_text("x = 1")
    (tmp_path / "c.py").write_text("y = 1")
    table = "\n".join(f"| `{row}` | sets it |" for row in rows)
    assert list(wrong_stations(PAGE.format(table), {"x": r"\bx\b"}, tmp_path)) == [
        wrong
    ]
    assert not list(
        wrong_stations(
            PAGE.format(f"| `c.py` | {CARRIES} |"), {"x": r"\bx\b"}, tmp_path
        )
    )


def test_imports_upwards_repeated_names_and_fragments_are_found(tmp_path):
    files = {
        "autotune/low/__init__.py": '"""Low."""',
        "autotune/high/__init__.py": '"""High."""',
        "autotune/low/thing.py": (
            "from autotune.high import thing\nfrom autotune.high.values import X"
        ),
        "autotune/high/values.py": 'class X:\n    a: int\n    """Of it."""',
        "autotune/high/thing.py": "from autotune.low import thing\nclass X:\n    ...",
        "autotune/low/command.py": "from autotune.high import thing",
    }
    for path, text in files.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    (tmp_path / "pyproject.toml").write_text(
        '[[tool.importlinter.contracts]]\ntype = "layers"\nlayers = ["high", "low"]'
    )
    found = Sources(list(files), tmp_path)
    assert [(edge.source, edge.target) for edge in found.against_direction] == [
        (("low", "thing"), ("high", "thing"))
    ]
    assert (found.repeated_modules, found.repeated_classes) == (["thing"], ["X"])
    assert found.fragments == (["autotune/high/values.py:3: Of it."], 3)
    assert found.house() == "\n```text\n│ high  High\n├───────\n│ low   Low\n```\n"
