"""``autotune report review``: somebody answers for a profile, or says why not."""

from pathlib import Path
from typing import Annotated

import typer

from autotune.commands.completion import profiles
from autotune.commands.options import REPORTS, AsJson, Reports


def review(
    *,
    profile: Annotated[Path, typer.Argument(help="The profile that is reviewed.", autocompletion=profiles)],
    approve: Annotated[bool, typer.Option("--approve", help="It may be trained from, as it is now.")] = False,
    reject: Annotated[bool, typer.Option("--reject", help="It may not.")] = False,
    by: Annotated[str | None, typer.Option(metavar="NAME", help="Who says so.")] = None,
    note: Annotated[str | None, typer.Option(metavar="TEXT", help="Why; up to 2,000 characters.")] = None,
    as_edited: Annotated[
        bool, typer.Option("--as-edited", help="Approve what it says now, though it was edited after it was measured.")
    ] = False,
    reports: Reports = REPORTS,
    as_json: AsJson = False,
) -> None:
    """Approve or reject a profile; without either, show how it stands. Any later edit of the profile voids it."""
    from autotune.errors import UsageError
    from autotune.search import reviews
    from autotune.show.answers import answer_json
    from autotune.show.answers.report import ReviewAnswer
    from autotune.show.review import review_text

    if approve and reject:
        raise UsageError("--approve and --reject contradict each other", next_step="Leave out one of them.")
    if not (approve or reject) and (by is not None or note is not None or as_edited):
        raise UsageError(
            "--by, --note and --as-edited belong to a verdict, and none was given",
            next_step="Add --approve or --reject.",
        )
    if (approve or reject) and by is None:
        raise UsageError("a verdict needs a name", next_step="Add --by NAME.")
    if by is not None:
        found = reviews.review(
            profile, reports, "approved" if approve else "rejected", by=by, note=note, as_edited=as_edited
        )
    else:
        found = reviews.read_reviewed(profile, reports)
    if as_json:
        answer = ReviewAnswer(
            profile=str(profile),
            content_sha256=found.standing.present_sha256,
            intact=found.intact,
            state=found.standing.state,
            reviews=list(found.reviews),
        )
        print(answer_json(answer))
    else:
        print(review_text(str(profile), found.standing, found.reviews, intact=found.intact))
