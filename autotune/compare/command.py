"""``autotune compare``: two profiles, tunings, runs or datasets side by side.

With ``--fail-if-slower`` it is a speed check for CI.
"""

import re
import sys
from pathlib import Path
from typing import Annotated

import typer

from autotune.console.options import AsJson, flag, option, profiles
from autotune.errors import NotCheckable, Slower, Undecided, UsageError


def compare(
    *,
    a: Annotated[
        Path,
        typer.Argument(
            metavar="A",
            help="Profile, trial log, run or dataset.",
            autocompletion=profiles,
        ),
    ],
    others: Annotated[
        list[Path],
        typer.Argument(
            metavar="B", help="Others of the same kind.", autocompletion=profiles
        ),
    ],
    fail_if_slower: Annotated[
        str | None,
        option(
            "SHARE",
            "Exit with 9 if one is slower than A by more than this, such as 5%.",
        ),
    ] = None,
    strict: Annotated[
        bool,
        flag("--strict", "Exit with 8 if noise leaves --fail-if-slower undecided."),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Show which differences exceed noise."""
    from autotune.base.answer_json import answer_json, jsonable
    from autotune.compare.decide import gate
    from autotune.compare.sections import comparison_text
    from autotune.compare.sides import compare_paths

    if strict and fail_if_slower is None:
        raise UsageError(
            "--strict requires --fail-if-slower", next_step="Add --fail-if-slower 5%"
        )
    lost_share = None if fail_if_slower is None else _share(fail_if_slower)
    every = [compare_paths(a, b) for b in others]
    gates = [None if lost_share is None else gate(found, lost_share) for found in every]
    if as_json:
        print(
            answer_json(
                {
                    "comparisons": [
                        {**jsonable(found), "gate": judged}
                        for found, judged in zip(every, gates, strict=True)
                    ]
                }
            )
        )
    else:
        print("\n\n\n".join(map(comparison_text, every, gates)))
    words = {
        judged.state: judged.words for judged in reversed(gates) if judged is not None
    }
    if "slower" in words:
        raise Slower(
            words["slower"],
            next_step="See the changes above, or allow more: --fail-if-slower 10%",
        )
    if "not comparable" in words:
        raise NotCheckable(
            words["not comparable"],
            next_step="Compare runs of the same settings on one machine.",
        )
    if "undecided" in words and strict:
        raise Undecided(
            words["undecided"],
            next_step="Train for more steps, or measure longer: --time-limit",
        )
    if "undecided" in words:
        sys.stderr.write(f"warning: {words['undecided']}\n")


def _share(text: str) -> float:
    """Read ``5%`` or ``0.05``."""
    match = re.fullmatch(r"\s*(\d{1,3}(?:\.\d{1,9})?)\s*(%?)\s*", text)
    share = float(match[1]) / (100 if match[2] else 1) if match else -1.0
    if not 0 <= share < 1:
        raise UsageError(
            f"--fail-if-slower {text[:40]!r} is not a share",
            next_step="Write --fail-if-slower 5%",
        )
    return share
