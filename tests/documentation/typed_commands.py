"""Typing of the commands of a page, in order.

They are typed in a shell, whose place and variables stay. What cannot run here or would
take long is replaced first, by a page's substitutions in order, each with its reason.

``python -m tests.documentation.typed_commands PAGE DIR`` types the ``$ `` lines of a
page in the empty directory DIR as they stand, on a quiet machine, and replaces what the
page shows behind each by what it prints, up to a last line "…".
"""

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.documentation.blocks import ROOT, Command, commands_of

_MAKE = (
    f"make --directory '{ROOT}' --assume-old .venv/.installed BIN=$(dirname $(command"
    " -v python))"
)
INSTALLING = re.compile(r"^(make install|\. \.venv/bin/activate)$")
_NO_GPU = "no GPU here: a small model on the CPU"
_QUICK = "less of the same, to be done sooner"
_NO_CLUSTER = "no cluster here: the script of the job is what it would submit"


# A regular expression, what replaces it (nothing where the whole command is left out),
# and why.
SUBSTITUTIONS: dict[str, tuple[tuple[str, str, str], ...]] = {
    "README.md": (
        (
            r"^make demo.*",
            (
                f"{_MAKE} demo DEMO=$PWD/demo DEMO_MODELS=$PWD/tiny/config.json"
                " DEMO_FUNCTIONS=300 DEMO_MEMORY=128MiB DEMO_MINUTES=1 DEMO_STEPS=2"
            ),
            _QUICK,
        ),
        (r"^make (?!--)(\S+).*", rf"{_MAKE} --dry-run \1", "this is one of its tests"),
        (r"^python -m pip install .*", "", "it is installed"),
        (r"--model bert-120m --gpu", "--model bert-mini --gpu", _QUICK),
        (r"--model bert-120m", "--model tiny/config.json", _NO_GPU),
        (r"profiles/bert-120m-\S*…\.toml", "profiles/tiny-cpu.toml", _NO_GPU),
        (r"text:corpus", "elf:/usr/bin --max-samples 300", "what is there"),
        (
            r"^(autotune tune --model tiny/config.json --data data)$",
            (
                r"\1 --memory 128MiB --device cpu --seq-length 64 --global-batch-tokens"
                r" 512 --time-limit 1min"
            ),
            _NO_GPU,
        ),
        (r"^(autotune train .*)", r"\1 --set train.max_steps=2", _QUICK),
    ),
    "docs/quickstart.md": (
        (INSTALLING.pattern, "", "it is installed"),
        (r"--max-samples \d+", "--max-samples 300", _QUICK),
        (r"--time-limit \w+", "--time-limit 4min --window 0.2s", _QUICK),
        (r"train\.max_steps=\d+", "train.max_steps=4", _QUICK),
    ),
    "docs/data.md": (
        (r"elf:/usr/bin", "elf:/usr/bin --max-samples 200", _QUICK),
        (r"--slurm-workers site\.toml --workers 64", "--workers 1", _NO_CLUSTER),
        (r"--workers 32 --slurm.*", "--workers 32 --slurm --dry-run", _NO_CLUSTER),
        (r"/corpus/\*\.jsonl\.gz", "events.jsonl", "what the test has made"),
        (r"--field text --out /shared", "--field doc.body --out /shared", "the same"),
        (r"/shared/data --to /local", "data/both --to local", "no such disks here"),
        (r"/shared/data", "data/again", "no such disks here"),
        (r"--time-limit \w+", "--time-limit 90s", _QUICK),
        (r"train\.max_steps=\d+", "train.max_steps=3", _QUICK),
    ),
}


def substituted(page: str, command: Command) -> tuple[str, frozenset[int]]:
    """Return the command to type instead, and the numbers of substitutions used."""
    text = command.text.partition("  #")[0].strip()
    used = set()
    for number, (pattern, by, _) in enumerate(SUBSTITUTIONS[page]):
        replaced = re.sub(pattern, by, text, flags=re.DOTALL)
        if replaced != text:
            used.add(number)
        text = replaced
    return text.strip(), frozenset(used)


SLURM = frozenset({"sacct", "salloc", "sbatch", "scontrol", "sinfo", "squeue", "srun"})
"""A newcomer's machine has none of these; where they are, measuring commands take it
for a login node."""
Done = subprocess.CompletedProcess[str]


class Shell:
    """Run commands by bash, the first one in a new directory."""

    def __init__(self, directory: Path) -> None:
        self._state = directory / ".shell"
        tools = self._state / "tools"
        tools.mkdir(parents=True)
        for place in (
            Path(sys.executable).parent,
            *map(Path, os.environ["PATH"].split(os.pathsep)),
        ):
            for tool in place.iterdir() if place.is_dir() else ():
                if tool.name not in SLURM and not (tools / tool.name).is_symlink():
                    (tools / tool.name).symlink_to(tool)
        self._environment = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("SLURM_", "AUTOTUNE_"))
        } | {"PATH": str(tools), "COLUMNS": "120", "OMP_NUM_THREADS": "1"}
        (self._state / "place").write_text(f"cd '{directory}'\n")

    def run(self, text: str) -> Done:
        """Type one command."""
        state = self._state / "place"
        script = (
            f"set -u; . '{state}'\n{text}\ncode=$?\n{{ echo \"cd '$PWD'\"; export -p;"
            f" }} > '{state}'; exit $code"
        )
        return subprocess.run(
            ["bash", "-c", script],
            env=self._environment,
            capture_output=True,
            text=True,
            timeout=1800,
            check=False,
        )


def typed(
    page: str, directory: Path, commands: Sequence[Command] | None = None
) -> list[tuple[Command, Done]]:
    """Type the commands of a page; each must end with 0."""
    shell = Shell(directory)
    processes = []
    for command in commands_of(ROOT / page) if commands is None else commands:
        if text := substituted(page, command)[0]:
            process = shell.run(text)
            assert process.returncode == 0, (
                f"{command.where}\nas:"
                f" {text}\n{process.stdout[-2000:]}\n{process.stderr[-4000:]}"
            )
            assert "Traceback" not in process.stderr
            processes.append((command, process))
    return processes


def fill(page: Path, work: Path) -> None:
    """Write the output of its commands into a page."""
    shell = Shell(work)
    lines = page.read_text().splitlines()
    outputs = []
    for command in commands_of(page):
        if lines[command.line - 1].startswith("$ ") and not INSTALLING.match(
            command.text
        ):
            process = shell.run(command.text)
            if process.returncode:
                sys.exit(f"{command.where}\n{process.stderr}")
            printed = process.stdout.replace(f"{work}/", "").rstrip("\n").splitlines()
            shown = len(command.prints) - 1
            outputs.append(
                (
                    command,
                    (
                        [*printed[:shown], "…"]
                        if command.prints[-1:] == ("…",)
                        else printed
                    ),
                )
            )
    for command, printed in reversed(outputs):
        first = command.line
        while lines[first - 1].endswith("\\"):
            first += 1
        lines[first : first + len(command.prints)] = [line.rstrip() for line in printed]
    page.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    fill(*(Path(word).resolve() for word in sys.argv[1:3]))
