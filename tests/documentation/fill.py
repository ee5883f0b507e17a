"""``python -m tests.documentation.fill PAGE --work DIR``: what the commands of a page print, from a real run.

Every ``$ `` line of the page's ``console`` blocks is typed in DIR, and what the page shows behind it is replaced by
what it prints on standard output. On a quiet machine, so that the figures are worth reading.
"""

import argparse
import sys
import time
from pathlib import Path

from tests.documentation.blocks import Command, commands_of
from tests.documentation.typed import INSTALLING, Shell


def main() -> int:
    """Type, and write the page anew."""
    parser = argparse.ArgumentParser(prog="python -m tests.documentation.fill")
    parser.add_argument("page", type=Path)
    parser.add_argument("--work", type=Path, required=True, help="an empty directory")
    asked = parser.parse_args()
    page = asked.page.resolve()
    work = asked.work.resolve()
    shell = Shell(work)
    lines = page.read_text().splitlines()
    told: list[tuple[Command, list[str]]] = []
    for command in commands_of(page):
        if lines[command.line - 1].startswith("$ ") and not INSTALLING.match(command.text):
            began_s = time.monotonic()
            done = shell.run(command.text)
            sys.stderr.write(f"{time.monotonic() - began_s:6.1f} s  {command.text}\n")
            if done.code:
                sys.stderr.write(done.said)
                return 1
            told.append((command, done.out.replace(f"{work}/", "").rstrip("\n").splitlines()))
    for command, printed in reversed(told):
        first = command.line
        while lines[first - 1].endswith("\\"):
            first += 1
        lines[first : first + len(command.prints)] = [line.rstrip() for line in printed]
    page.write_text("\n".join(lines) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
