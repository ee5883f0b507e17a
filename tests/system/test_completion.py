"""Completion as shells really do it: their own interpreters ask the installed
program."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.system

BIN = Path(sys.executable).parent
IN_BASH = """
eval "$(_AUTOTUNE_COMPLETE=source_bash autotune)"
complete -p autotune >/dev/null || exit 9
read -ra COMP_WORDS <<< "$1"
[[ $1 == *' ' ]] && COMP_WORDS+=("")
COMP_CWORD=$(( ${#COMP_WORDS[@]} - 1 ))
_autotune_completion autotune
printf '%s\\n' "${COMPREPLY[@]}"
"""


def _ask(command, **variables):
    environment = os.environ | {"PATH": f"{BIN}:{os.environ['PATH']}"} | variables
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def bash():
    if not (BIN / "autotune").exists():
        pytest.skip("autotune is not installed beside this interpreter")
    if shutil.which("bash") is None:
        pytest.skip("bash is not installed")
    return lambda line: _ask(["bash", "--norc", "-c", IN_BASH, "bash", line]).split()


@pytest.mark.parametrize(
    ("line", "offered"),
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
def test_bash_completes_commands_options_and_values(bash, line, offered):
    assert bash(line) == offered


@pytest.mark.parametrize(
    ("shell", "named"),
    [
        ("bash", "complete -o default"),
        ("zsh", "#compdef autotune"),
        ("fish", "complete --command autotune"),
    ],
)
def test_shell_script_calls_the_program_by_name(bash, shell, named):
    script = _ask(["autotune"], _AUTOTUNE_COMPLETE=f"source_{shell}")
    assert named in script
    assert f"_AUTOTUNE_COMPLETE=complete_{shell}" in script


def test_installation_adds_to_the_shells_files(bash, tmp_path):
    told = _ask(
        ["bash", "--norc", "-c", "autotune --install-completion; exit $?"],
        HOME=str(tmp_path),
    )
    assert "completion installed in" in told
    assert "autotune" in (tmp_path / ".bashrc").read_text()
    assert any(
        "_autotune_completion" in path.read_text()
        for path in tmp_path.rglob("*")
        if path.is_file()
    )


def test_completion_imports_nothing_heavy():
    asked = {
        "_AUTOTUNE_COMPLETE": "complete_bash",
        "COMP_WORDS": "autotune estimate --model b",
        "COMP_CWORD": "3",
    }
    code = (
        "import sys, autotune.cli\nsys.argv = ['autotune']\nassert autotune.cli.run([])"
        " == 0\nprint([name for name in ('torch', 'transformers', 'optuna', 'rich') if"
        " name in sys.modules])"
    )
    assert _ask([sys.executable, "-c", code], **asked).splitlines()[-1] == "[]"
