"""Commands in a directory, or beside a distribution, with modules of the same names."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

AUTOTUNE = Path(sys.executable).with_name("autotune")
SHADOW = 'raise RuntimeError("a local file was imported")\n'
QUICK_TUNING = (
    "--data data --device cpu --memory 400MiB --here --seq-length 32"
    " --global-batch-tokens 512 --time-limit 1min --max-micro-batch-size 4"
)

pytestmark = [pytest.mark.system, pytest.mark.slow]


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    """A working directory of somebody who calls their own files like our packages."""
    directory = tmp_path_factory.mktemp("work")
    for name in ("trainer.py", "autotune.py"):
        (directory / name).write_text(SHADOW)
    words = ["alpha beta gamma delta epsilon zeta eta theta"] * 3
    corpus = directory / "corpus"
    corpus.mkdir()
    lines = [f"{' '.join(words)} number {number}\n" for number in range(400)]
    (corpus / "text.txt").write_text("".join(lines))
    return directory


COMMANDS = (
    "doctor",
    "estimate --model bert-mini --gpu h100-nvl-94gb --seq-length 32 --no-compile",
    "data prepare text:corpus --out data --workers 2",
    "data inspect data --seq-length 32",
    "data verify data",
    "data stage data --to .",
    f"probe --model bert-mini {QUICK_TUNING} --out p.toml",
    "workers p.toml --here --data data --time-limit 20s --window 0.2s",
    "network p.toml --here --data data --ranks 2 --time-limit 20s",
    "confirm p.toml --here --data data --time-limit 20s --window 0.2s",
    "baseline p.toml --here --data data --time-limit 20s --window 0.2s",
    "advise p.toml --data data",
    "plan p.toml --data data --steps 100",
    "report p.toml --data data --out report.html",
    "compare p.toml p.toml",
    "profile show p.toml",
    "profile verify p.toml",
    "profile export p.toml --to hf-trainer",
    "train p.toml --data data --ranks 2 --out run --set train.max_steps=2"
    " --set train.warmup_steps=1",
    "status",
    f"tune --model bert-mini {QUICK_TUNING} --window 0.2s --out tuned --skip baseline",
)


@pytest.mark.parametrize("command", COMMANDS)
def test_local_files_replace_no_package(directory, command):
    """In their order: later commands read the files of earlier ones."""
    result = subprocess.run(
        [AUTOTUNE, *command.split()],
        cwd=directory,
        check=False,
        capture_output=True,
        text=True,
        timeout=600,
    )
    printed = result.stdout + result.stderr
    assert "a local file was imported" not in printed
    assert "Report this as a bug" not in printed
    # Too little time and noise are no failures here.
    assert result.returncode in (0, 7, 8), printed


def test_doctor_names_another_distribution(tmp_path):
    package = tmp_path / "trainer"
    package.mkdir()
    (package / "__init__.py").touch()
    metadata = tmp_path / "trainer-0.0.5.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: trainer\n")
    (metadata / "RECORD").write_text("trainer/__init__.py,,\n")
    (metadata / "top_level.txt").write_text("trainer\n")
    # Behind everything else, so that our trainer is still the one that is imported.
    start = (
        f"import sys; sys.path.append({str(tmp_path)!r}); import autotune.cli as cli"
    )
    answer = subprocess.run(
        [sys.executable, "-c", f"{start}; sys.exit(cli.run(['doctor', '--json']))"],
        env=os.environ,
        capture_output=True,
        text=True,
        check=True,
    )
    claims = [finding["claim"] for finding in json.loads(answer.stdout)["findings"]]
    assert any("distribution 'trainer'" in claim for claim in claims)
