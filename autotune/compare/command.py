"""``autotune compare``: profiles, tunings, runs or datasets side by side, and a speed check for CI."""

import re
import sys
from pathlib import Path
from typing import Annotated

import typer

from autotune.console.options import AsJson, profiles
from autotune.errors import NotCheckable, Slower, Undecided, UsageError


def compare(
    *,
    a: Annotated[
        Path, typer.Argument(metavar="A", help="A profile, trial log, run or dataset.", autocompletion=profiles)
    ],
    others: Annotated[
        list[Path], typer.Argument(metavar="B [C]...", help="Others of its kind.", autocompletion=profiles)
    ],
    fail_if_slower: Annotated[
        str | None,
        typer.Option(metavar="SHARE", help="Exit with 9 if one loses more than this of A's speed, such as 5%."),
    ] = None,
    strict: Annotated[
        bool, typer.Option("--strict", help="With --fail-if-slower: exit with 8 if noise leaves it open.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Show what differs from A and what exceeds noise."""
    from autotune.base.document import answer_json, plain
    from autotune.compare.decide import gate
    from autotune.compare.sections import comparison_text
    from autotune.compare.sides import compare_paths

    if strict and fail_if_slower is None:
        raise UsageError("--strict requires --fail-if-slower", next_step="Add --fail-if-slower 5%.")
    lost_share = None if fail_if_slower is None else _share(fail_if_slower)
    every = [compare_paths(a, b) for b in others]
    gates = [None if lost_share is None else gate(found, lost_share) for found in every]
    if as_json:
        print(answer_json([{**plain(found), "gate": judged} for found, judged in zip(every, gates, strict=True)]))
    else:
        texts = [comparison_text(found, judged) for found, judged in zip(every, gates, strict=True)]
        print("\n\n\n".join(texts))
    words = {judged.state: judged.words for judged in reversed(gates) if judged is not None}
    if "slower" in words:
        raise Slower(words["slower"], next_step="See above what changed; or allow more: --fail-if-slower.")
    if "not comparable" in words:
        raise NotCheckable(words["not comparable"], next_step="Compare what was trained alike, on one machine.")
    if "undecided" in words and strict:
        raise Undecided(words["undecided"], next_step="Train for more steps, or measure for more minutes.")
    if "undecided" in words:
        sys.stderr.write(f"warn: {words['undecided']}\n")


def _share(text: str) -> float:
    """Read ``5%`` or ``0.05``."""
    match = re.fullmatch(r"\s*(\d{1,3}(?:\.\d{1,9})?)\s*(%?)\s*", text)
    share = float(match[1]) / (100 if match[2] else 1) if match else -1.0
    if not 0 <= share < 1:
        raise UsageError(f"--fail-if-slower {text[:40]!r} is not a share", next_step="Write 5% or 0.05.")
    return share
