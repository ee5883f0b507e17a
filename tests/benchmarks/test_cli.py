import json
import sys

import pytest

from benchmarks import cli
from tests.simulators.programs import CannotMeasure


def test_real_help_is_timed_and_does_not_import_torch(tmp_path, capsys):
    code = cli.main(["--json", str(tmp_path / "cli.json")])
    written = json.loads((tmp_path / "cli.json").read_text())
    lines = capsys.readouterr().out.splitlines()
    assert [seconds > 0 for seconds in written["runs_s"]] == [True] * cli.RUNS
    assert written["heavy_imports"] == []
    assert [bar["name"] for bar in written["bars"]] == ["cli_help_s", "cli_help_heavy_imports_count"]
    # How fast it is here and now is the benchmark's to say, not a test's.
    assert code == (0 if written["bars"][0]["holds"] else 1)
    assert lines[-2].startswith(f"cli_help_s figure={sorted(written['runs_s'])[2]:.4g} bar<=0.5 ")
    assert lines[-1] == "cli_help_heavy_imports_count figure=0 bar<=0 ok"


def test_an_import_of_a_heavy_library_is_found_and_a_failed_command_says_its_code(tmp_path, monkeypatch):
    (tmp_path / "torch.py").write_text("")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert cli.heavy_imports([sys.executable, "-c", "import json, torch"]) == ["torch"]
    with pytest.raises(CannotMeasure, match="code 3"):
        cli.heavy_imports([sys.executable, "-c", "raise SystemExit(3)"])


def test_the_median_and_the_imports_decide():
    fast, clean = cli.make_bars([0.1, 0.2, 9.0], [])
    assert (fast.figure, fast.holds, clean.holds) == (0.2, True, True)
    slow, heavy = cli.make_bars([0.7, 0.8, 0.1], ["torch"])
    assert (slow.holds, heavy.holds) == (False, False)


@pytest.mark.parametrize(
    "command",
    [(sys.executable, "-c", "import json, sys; sys.exit('broken')"), ("/nowhere/python", "-c", "pass")],
)
def test_a_command_that_fails_cannot_be_measured(command, monkeypatch, capsys):
    monkeypatch.setattr(cli, "COMMAND", command)
    assert cli.main([]) == 2
    assert "error:" in capsys.readouterr().err
