"""Asks the job's script, which is outside of the container, to start something on several nodes.

``N.sh`` is what each node is to run and ``N.nodes`` how many; the script answers with ``N.log`` and at last ``N.code``.
``N.end`` asks it to stop. One after the other, so the highest number is the one that runs.
"""

import signal
import sys
import time
from pathlib import Path

from trainer.disk import write_atomically

STARTER_VARIABLE = "AUTOTUNE_STARTER"
POLL_S = 0.1


def start_outside(directory: Path, nodes: int, script: str) -> int:
    """Let the job's script run something on its first nodes, and wait for the end; a TERM is passed on.

    Args:
        directory: Where the job's script looks, seen by both sides.
        nodes: So many of the job's.
        script: What bash is to run on each.

    Returns:
        The exit code of ``srun``; its output has been written to standard output.
    """
    number = 1 + len(list(directory.glob("*.nodes")))
    asked = directory / str(number)
    signal.signal(signal.SIGTERM, lambda *_: asked.with_suffix(".end").touch())
    asked.with_suffix(".sh").write_text(script + "\n")
    write_atomically(asked.with_suffix(".nodes"), f"{nodes}\n", durable=False)
    answer = asked.with_suffix(".code")
    while not answer.is_file():
        time.sleep(POLL_S)
    log = asked.with_suffix(".log")
    if log.is_file():
        sys.stdout.write(log.read_text(errors="replace"))
    return int(answer.read_text())
