import json
import subprocess
import sys

import pytest

from benchmarks.cli import CannotMeasure, heavy_imports, make_bars


def test_the_benchmark_runs_and_writes_what_it_prints(tmp_path):
    path = tmp_path / "cli.json"
    command = [sys.executable, "-m", "benchmarks.cli", "--json", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    # 1 says that a bar was missed, which on a busy machine is no fault of the benchmark.
    assert done.returncode in (0, 1), done.stderr
    content = json.loads(path.read_text())
    assert len(content["runs_s"]) == 5
    assert content["heavy_imports"] == []
    figure = f"{sorted(content['runs_s'])[2]:.4g}"
    assert done.stdout.splitlines()[-2].startswith(f"cli_help_s figure={figure} bar<=0.5 ")


def test_a_heavy_import_is_found():
    assert heavy_imports([sys.executable, "-c", "import json, optuna"]) == ["optuna"]


def test_a_heavy_import_misses_its_bar():
    assert [bar.holds for bar in make_bars([0.1] * 5, ["torch"])] == [True, False]


def test_a_command_that_fails_is_not_measured():
    with pytest.raises(CannotMeasure, match="code 3"):
        heavy_imports([sys.executable, "-c", "raise SystemExit(3)"])
