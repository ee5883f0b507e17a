"""``autotune report compare``: two profiles, tunings or runs side by side; for CI, is the second one slower?"""

import re
import sys
from pathlib import Path
from typing import Annotated

import typer

from autotune.commands.options import AsJson
from autotune.errors import NotCheckable, Slower, Undecided, UsageError


def compare(
    *,
    a: Annotated[Path, typer.Argument(metavar="A", help="A profile, a directory under reports/, or one under runs/.")],
    b: Annotated[Path, typer.Argument(metavar="B", help="Another one.")],
    fail_if_slower: Annotated[
        str | None,
        typer.Option(metavar="SHARE", help="Exit with 9 if B loses more than this of A's speed, such as 5%."),
    ] = None,
    strict: Annotated[
        bool, typer.Option("--strict", help="With --fail-if-slower: exit with 8 if noise leaves it open.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Say what changed from A to B, and which differences in figures are beyond noise."""
    from autotune.decide.comparison import gate
    from autotune.search.compare import compare_paths
    from autotune.show.answers import answer_json
    from autotune.show.answers.compare import compare_answer
    from autotune.show.comparison import comparison_text

    if strict and fail_if_slower is None:
        raise UsageError("--strict says what --fail-if-slower does", next_step="Add --fail-if-slower 5%.")
    lost_share = None if fail_if_slower is None else _share(fail_if_slower)
    found = compare_paths(a, b)
    judged = None if lost_share is None else gate(found, lost_share)
    if as_json:
        print(answer_json(compare_answer(found, judged)))
    else:
        print(comparison_text(found, judged))
    if judged is None or judged.state == "passes":
        return
    if judged.state == "slower":
        raise Slower(judged.words, next_step="See above what changed; or allow more: --fail-if-slower.")
    if judged.state == "not comparable":
        raise NotCheckable(judged.words, next_step="Compare what was trained alike, on one machine.")
    if strict:
        raise Undecided(judged.words, next_step="Train for more steps, or measure for more minutes.")
    sys.stderr.write(f"warn: {judged.words}\n")


def _share(text: str) -> float:
    """Read ``5%`` or ``0.05``."""
    match = re.fullmatch(r"\s*(\d{1,3}(?:\.\d{1,9})?)\s*(%?)\s*", text)
    share = float(match[1]) / (100 if match[2] else 1) if match else -1.0
    if not 0 <= share < 1:
        raise UsageError(f"--fail-if-slower {text[:40]!r} is not a share", next_step="Write 5% or 0.05.")
    return share
