"""Completion in real shells, which call the installed program."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.system

BIN = Path(sys.executable).parent
COMPLETE_IN_BASH = """
eval "$(_AUTOTUNE_COMPLETE=source_bash autotune)"
complete -p autotune >/dev/null || exit 9
read -ra COMP_WORDS <<< "$1"
[[ $1 == *' ' ]] && COMP_WORDS+=("")
COMP_CWORD=$(( ${#COMP_WORDS[@]} - 1 ))
_autotune_completion autotune
printf '%s\\n' "${COMPREPLY[@]}"
"""


def output_of(command, **variables):
    environment = os.environ | {"PATH": f"{BIN}:{os.environ['PATH']}"} | variables
    ended = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env=environment,
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


@pytest.fixture(scope="module")
def bash():
    """Return a function that returns what bash offers for a line."""
    if not (BIN / "autotune").exists():
        pytest.skip("autotune is not installed beside this interpreter")
    if shutil.which("bash") is None:
        pytest.skip("bash is not installed")

    def complete(line):
        command = ["bash", "--norc", "-c", COMPLETE_IN_BASH, "bash", line]
        return output_of(command).split()

    return complete


@pytest.mark.parametrize(
    ("line", "offers"),
    [
        ("autotune es", ["estimate"]),
        ("autotune profile ", ["show", "verify", "approve", "export"]),
        ("autotune estimate --what", ["--what-if"]),
        ("autotune estimate --model bert-m", ["bert-mini"]),
        ("autotune estimate --model bert-mini --gpu h100-n", ["h100-nvl-94gb"]),
        ("autotune profile export --to ", ["hf-trainer", "accelerate", "lightning"]),
        ("autotune tune", ["tune"]),  # and not the command of jobs, tune-between-nodes
    ],
)
def test_bash_completes_a_line(bash, line, offers):
    assert bash(line) == offers


@pytest.mark.parametrize(
    ("shell", "registration"),
    [
        ("bash", "complete -o default"),
        ("zsh", "#compdef autotune"),
        ("fish", "complete --command autotune"),
    ],
)
def test_shell_script_calls_the_program_by_name(bash, shell, registration):
    script = output_of(["autotune"], _AUTOTUNE_COMPLETE=f"source_{shell}")
    assert registration in script
    assert f"_AUTOTUNE_COMPLETE=complete_{shell}" in script


def test_installation_adds_to_the_shells_files(bash, tmp_path):
    output = output_of(
        ["bash", "--norc", "-c", "autotune --install-completion; exit $?"],
        HOME=str(tmp_path),
    )
    assert "completion installed in" in output
    assert "autotune" in (tmp_path / ".bashrc").read_text()
    installed = [path.read_text() for path in tmp_path.rglob("*") if path.is_file()]
    assert any("_autotune_completion" in text for text in installed)


def test_completion_imports_nothing_heavy():
    code = """
import sys
import autotune.cli
sys.argv = ["autotune"]
assert autotune.cli.run([]) == 0
heavy = {"torch", "transformers", "optuna", "rich"}
print(sorted(heavy & sys.modules.keys()))
"""
    output = output_of(
        [sys.executable, "-c", code],
        _AUTOTUNE_COMPLETE="complete_bash",
        COMP_WORDS="autotune estimate --model b",
        COMP_CWORD="3",
    )
    assert output.splitlines()[-1] == "[]"
