"""A shell in which documented commands are typed one after the other: places and variables stay."""

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

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
