"""Commands of pages, typed one after the other in a shell: places and variables stay.

What cannot run here or would take long is replaced first, by a page's substitutions in order, each with its reason.
"""

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.documentation.blocks import ROOT, Command, commands_of

_MAKE = f"make --directory '{ROOT}' --assume-old .venv/.installed BIN=$(dirname $(command -v python))"
INSTALLING = re.compile(r"^(make install|\. \.venv/bin/activate)$")
_NO_CARD = "no GPU here: a small model on the CPU"
_QUICK = "less of the same, to be done sooner"
_NO_CLUSTER = "no cluster here: the script of the job is what it would submit"


@dataclass(frozen=True, slots=True, kw_only=True)
class Substitution:
    """One replacement."""

    pattern: str
    """A regular expression."""
    by: str
    """As ``re.sub`` takes it; empty where the whole command is left out."""
    because: str


SUBSTITUTIONS: dict[str, tuple[Substitution, ...]] = {
    "README.md": (
        Substitution(
            pattern=r"^make demo.*",
            by=f"{_MAKE} demo DEMO=$PWD/demo DEMO_MODELS=bert-mini DEMO_FUNCTIONS=300 DEMO_MEMORY=200MiB "
            "DEMO_MINUTES=3 DEMO_STEPS=2",
            because=_QUICK,
        ),
        Substitution(pattern=r"^make (?!--)(\S+).*", by=rf"{_MAKE} --dry-run \1", because="this is one of its tests"),
        Substitution(pattern=r"(--model bert-(120|350)m ?)+", by="--model tiny/config.json ", because=_NO_CARD),
        Substitution(pattern=r"profiles/bert-120m-\S*…\.toml", by="profiles/tiny-cpu.toml", because=_NO_CARD),
        Substitution(pattern=r"\bDIR\b", by="demo/data", because="what make demo has prepared"),
        Substitution(
            pattern=r"^(autotune (?:tune|network) .*)--slurm --wait.*", by=r"\1--slurm --dry-run", because=_NO_CLUSTER
        ),
        Substitution(pattern=r"--submit", by="--out runs/job", because=_NO_CLUSTER),
        Substitution(
            pattern=r"^(autotune tune --model tiny/config.json --data demo/data)$",
            by=r"\1 --memory 128MiB --device cpu --seq-length 64 --global-batch-tokens 512 --minutes 1.5",
            because=_NO_CARD,
        ),
        Substitution(
            pattern=r"^autotune tune --model bert-mini --model docs\S+ (.*) --memory 256MiB …$",
            by=r"autotune tune --model bert-mini \1 --memory 200MiB --here --seq-length 128 --global-batch-tokens 1024 "
            r"--window 0.5 --minutes 3 --out demo/profiles --reports demo/reports",
            because="as make demo had it: all but the end is in its ledger",
        ),
        Substitution(
            pattern=r"^(torchrun .*?)(?: …)?$", by=r"\1 --set train.max_steps=2 --out runs/$RANDOM", because=_QUICK
        ),
        Substitution(
            pattern=r"^(autotune scale \S+ \S+).*", by=r"\1 --bandwidth 1Gbit", because="no network was measured"
        ),
    ),
    "docs/tutorial.md": (
        Substitution(pattern=INSTALLING.pattern, by="", because="it is installed"),
        Substitution(pattern=r"--max-samples \d+", by="--max-samples 300", because=_QUICK),
        Substitution(pattern=r"--memory \S+", by="--memory 256MiB", because=_QUICK),
        Substitution(pattern=r"--minutes \d+", by="--minutes 5", because=_QUICK),
        Substitution(pattern=r"train\.max_steps=\d+", by="train.max_steps=4", because=_QUICK),
    ),
    "docs/own-data.md": (
        Substitution(pattern=r"elf:/usr/bin", by="elf:/usr/bin --max-samples 200", because=_QUICK),
        Substitution(pattern=r"--slurm-workers site\.toml --workers 64", by="--workers 1", because=_NO_CLUSTER),
        Substitution(pattern=r"--workers 32 --slurm.*", by="--workers 32 --slurm --dry-run", because=_NO_CLUSTER),
        Substitution(pattern=r"/corpus/\*\.jsonl\.gz", by="events.jsonl", because="what the test has made"),
        Substitution(pattern=r"--field text --out /shared", by="--field doc.body --out /shared", because="the same"),
        Substitution(pattern=r"/shared/data --to /local", by="data/both --to local", because="no such disks here"),
        Substitution(pattern=r"/shared/data", by="data/again", because="no such disks here"),
        Substitution(pattern=r"--minutes \d+", by="--minutes 0.1", because=_QUICK),
        Substitution(pattern=r"train\.max_steps=\d+", by="train.max_steps=3", because=_QUICK),
    ),
}


def substituted(page: str, text: str) -> tuple[str, frozenset[int]]:
    """What is typed instead of a command.

    Args:
        page: Its path in the repository.
        text: The command, without a comment.

    Returns:
        What to type, and which of the page's substitutions had something to replace.
    """
    used = set()
    for number, one in enumerate(SUBSTITUTIONS[page]):
        replaced = re.sub(one.pattern, lambda found, one=one: found.expand(one.by), text, flags=re.DOTALL)
        if replaced != text:
            used.add(number)
        text = replaced
    return text.strip(), frozenset(used)


SLURM = frozenset({"sacct", "salloc", "sbatch", "scontrol", "sinfo", "squeue", "srun"})
"""A newcomer's machine has none of these; where they are, measuring commands take it for a login node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """What a command did."""

    code: int
    out: str
    said: str
    """On standard error."""


class Shell:
    """Runs commands by bash in a directory.

    Args:
        directory: Where the first command runs; made if it is not there.
    """

    def __init__(self, directory: Path) -> None:
        self._state = directory / ".shell"
        tools = self._state / "tools"
        tools.mkdir(parents=True)
        for place in (Path(sys.executable).parent, *map(Path, os.environ["PATH"].split(os.pathsep))):
            for tool in place.iterdir() if place.is_dir() else ():
                if tool.name not in SLURM and not (tools / tool.name).is_symlink():
                    (tools / tool.name).symlink_to(tool)
        self._environment = {
            name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "AUTOTUNE_"))
        } | {"PATH": str(tools), "COLUMNS": "120", "OMP_NUM_THREADS": "1"}
        (self._state / "place").write_text(f"cd '{directory}'\n")

    def run(self, text: str, timeout_s: float = 1800) -> Done:
        """Type one command."""
        state = self._state / "place"
        script = f"set -u; . '{state}'\n{text}\ncode=$?\n{{ echo \"cd '$PWD'\"; export -p; }} > '{state}'; exit $code"
        done = subprocess.run(
            ["bash", "-c", script],
            env=self._environment,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        return Done(code=done.returncode, out=done.stdout, said=done.stderr)


def typed(page: str, directory: Path, commands: Sequence[Command] | None = None) -> list[tuple[Command, Done]]:
    """Type the commands of a page; each must end with 0."""
    shell = Shell(directory)
    done = []
    for command in commands_of(ROOT / page) if commands is None else commands:
        text, _ = substituted(page, words_of(command))
        if not text:
            continue
        one = shell.run(text)
        assert one.code == 0, f"{command.where}\nas: {text}\n{one.out[-2000:]}\n{one.said[-4000:]}"
        assert "Traceback" not in one.said
        done.append((command, one))
    return done


def words_of(command: Command) -> str:
    """Without its comment, and with everything else as it was typed."""
    return command.text.partition("  #")[0].strip()
