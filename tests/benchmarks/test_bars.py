import json
import sys
from unittest.mock import Mock

import pytest

from autotune.errors import MachineLacks
from benchmarks import cli
from benchmarks.bars import Bar, exit_code
from testbed.programs import CannotMeasure


def bar(figure: float | None, direction: str = "<=") -> Bar:
    return Bar(name="cli_help_s", figure=figure, unit="s", bar=0.5, direction=direction)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("figure", "direction", "verdict"),
    [
        (0.31, "<=", "ok"),
        (0.5, "<=", "ok"),
        (0.62, "<=", "missed"),
        (None, "<=", "not measured"),
        (4.31, ">=", "ok"),
        (0.5, ">=", "ok"),
        (0.4, ">=", "missed"),
    ],
)
def test_bar_is_one_line_with_its_verdict(figure, direction, verdict):
    line = (
        f"cli_help_s figure={'n/a' if figure is None else figure} bar{direction}0.5"
        f" {verdict}"
    )
    assert bar(figure, direction).line == line


@pytest.mark.parametrize(
    ("figures", "code"),
    [
        ([0.1], 0),
        ([0.1, 0.2], 0),
        ([0.1, 0.9], 1),
        ([0.1, None], 2),
        ([None, 0.9], 1),
        ([], 2),
    ],
)
def test_exit_code_is_the_worst_bar(figures, code):
    assert exit_code([bar(figure) for figure in figures]) == code


def test_help_does_not_import_torch(tmp_path, capsys):
    code = cli.main(["--json", str(tmp_path / "cli.json")])
    written = json.loads((tmp_path / "cli.json").read_text())
    lines = capsys.readouterr().out.splitlines()
    assert [seconds > 0 for seconds in written["runs_cpu_s"]] == [True] * cli.RUNS
    assert written["heavy_imports"] == []
    assert [bar["name"] for bar in written["bars"]] == [
        "cli_help_cpu_s",
        "cli_help_heavy_imports_count",
    ]
    same = {"figure": 0, "unit": "count", "bar": 0, "direction": "<=", "holds": True}
    assert written["bars"][1].items() >= same.items()
    # How fast it is here and now is the benchmark's to say, not a test's.
    assert code == (0 if written["bars"][0]["holds"] else 1)
    assert lines[-2].startswith(
        f"cli_help_cpu_s figure={sorted(written['runs_cpu_s'])[2]:.4g} bar<=0.15 "
    )
    assert lines[-1] == "cli_help_heavy_imports_count figure=0 bar<=0 ok"


def test_finds_heavy_imports(tmp_path, monkeypatch):
    (tmp_path / "torch.py").write_text("")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert cli.heavy_imports([sys.executable, "-c", "import json, torch"]) == ["torch"]


def test_failed_command_names_its_exit_code():
    with pytest.raises(CannotMeasure, match="code 3"):
        cli.heavy_imports([sys.executable, "-c", "raise SystemExit(3)"])


def test_median_decides_the_bar():
    fast, clean = cli.make_bars([0.05, 0.1, 9.0], [])
    assert (fast.figure, fast.holds, clean.holds) == (0.1, True, True)


def test_heavy_import_misses_the_bar():
    slow, heavy = cli.make_bars([0.7, 0.8, 0.1], ["torch"])
    assert (slow.holds, heavy.holds) == (False, False)


@pytest.mark.parametrize(
    "command",
    [(sys.executable, "-c", "import sys; sys.exit('broken')"), ("/nowhere/python",)],
    ids=["exit code", "not found"],
)
def test_failing_command_cannot_be_measured(command, monkeypatch, capsys):
    monkeypatch.setattr(cli, "COMMAND", command)
    assert cli.main([]) == 2
    assert "error:" in capsys.readouterr().err


@pytest.mark.parametrize(
    "error",
    [MachineLacks("no chromium here", next_step="x"), ImportError("no lightning")],
    ids=["machine", "library"],
)
def test_missing_requirement_is_an_error(error, monkeypatch, capsys):
    monkeypatch.setattr(cli, "heavy_imports", Mock(side_effect=error))
    assert cli.main([]) == 2
    assert f"error: {error}" in capsys.readouterr().err
