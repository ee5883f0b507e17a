"""``autotune profile``: show, explain, verify and approve a profile.

Each command imports its own modules when it runs, so that help and the completion of a
shell start without them.
"""

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from autotune.console import options as opt
from autotune.errors import UsageError

if TYPE_CHECKING:
    from autotune.profiles.approval import ProfileWithApproval
    from autotune.profiles.checks import Verification

app = typer.Typer(
    help="Show, verify, approve and export profiles.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


@app.command("show")
def show(
    *,
    profile: opt.OneProfile,
    key: Annotated[
        str | None,
        typer.Argument(
            metavar="KEY",
            help="Setting, such as data.num_workers, or a group of settings.",
        ),
    ] = None,
    explain: Annotated[
        bool, opt.flag("--explain", "Show the measurements behind every setting.")
    ] = False,
    reports: opt.Reports = opt.REPORTS,
    as_json: opt.AsJson = False,
) -> None:
    """Show a profile's settings and their evidence.

    With KEY or --explain: the origin of a setting (measured, requested, or default) and
    the measurements behind it.
    """
    from autotune.base.answer_json import answer_json
    from autotune.profiles.approval import read_with_approval
    from autotune.profiles.sections import profile_answer, profile_text

    stored = read_with_approval(profile, reports)
    if key is not None or explain:
        _show_explanations(stored, key, as_json=as_json)
    elif as_json:
        answer = {
            **profile_answer(stored.profile),
            "intact": stored.intact,
            "approval": stored.approval.state,
        }
        print(answer_json(answer))
    else:
        print(profile_text(stored.profile, stored.approval, intact=stored.intact))


def _show_explanations(
    stored: "ProfileWithApproval", key: str | None, *, as_json: bool
) -> None:
    """Show the origin of all settings, or of those that ``key`` selects.

    Raises:
        BadInput: If ``key`` is unknown.
    """
    from autotune.base.answer_json import answer_json
    from autotune.profiles.decide.explain import explanations, select_explanations
    from autotune.profiles.explanation_text import explanation_text, explanations_text
    from autotune.profiles.exploration_text import exploration_text

    settings = explanations(stored.profile)
    if key is not None:
        settings = select_explanations(settings, key)
    explore = stored.profile.evidence.explore
    if as_json:
        print(answer_json({"settings": settings}))
    elif key is not None:
        print("\n\n".join(map(explanation_text, settings)))
    else:
        print(explanations_text(settings))
        if explore is not None:
            print(f"\n{exploration_text(explore)}")


@app.command("verify")
def verify(
    *,
    profile: opt.OneProfile,
    data: opt.ProfileData = None,
    require_approved: opt.RequireApproved = False,
    reports: opt.Reports = opt.REPORTS,
    as_json: opt.AsJson = False,
) -> None:
    """Check that a profile matches this machine.

    Compares every field of its fingerprint, and its figures with its trial log;
    measures nothing.
    """
    from autotune.base.answer_json import answer_json
    from autotune.profiles.approval import read_with_approval, reject_unapproved
    from autotune.profiles.recorded_trials import read_trials
    from autotune.profiles.review_text import verification_text

    stored = read_with_approval(profile, reports)
    trial_log = read_trials(profile, stored.profile, reports).check
    result = _verify_here(stored, data)
    if as_json:
        answer = {
            "profile": profile,
            "intact": stored.intact,
            "approval": stored.approval.state,
            "trial_log": trial_log,
            "checks": result.checks,
        }
        print(answer_json(answer))
    else:
        print(
            verification_text(result, trial_log, stored.approval, intact=stored.intact)
        )
    if require_approved or stored.approval.state in ("rejected", "voided"):
        reject_unapproved(stored, reports)
    result.raise_if_bad(str(profile))


def _verify_here(stored: "ProfileWithApproval", data: Path | None) -> "Verification":
    """Compare a profile with this machine.

    Args:
        stored: Profile to compare.
        data: Directory of the dataset; ignored for a profile of your own code.
    """
    from autotune.machine.host import SystemHost
    from autotune.profiles.verification import verify_profile
    from autotune.trials.fork_server import ForkServerMachine
    from trainer.formats.nvml import NvmlMonitor

    def read_cuda() -> str | None:
        """Return the CUDA version of torch; None if torch is built without it."""
        # This process never imports torch, so that another one must be asked. Starting
        # it takes seconds: the comparison calls this only for a GPU.
        with ForkServerMachine() as server:
            server.start()
            return server.versions.get("cuda")

    with contextlib.closing(NvmlMonitor()) as monitor:
        return verify_profile(stored, data, SystemHost(), monitor, read_cuda)


@app.command("approve")
def approve(
    *,
    profile: opt.OneProfile,
    by: Annotated[
        str | None,
        opt.option("NAME", "Reviewer name. Default: only show the approval."),
    ] = None,
    reject: Annotated[bool, opt.flag("--reject", "Reject the profile.")] = False,
    note: Annotated[
        str | None, opt.option("TEXT", "Comment, up to 2,000 characters.")
    ] = None,
    as_edited: Annotated[
        bool,
        opt.flag(
            "--as-edited", "Approve although it was modified after it was measured."
        ),
    ] = False,
    reports: opt.Reports = opt.REPORTS,
    as_json: opt.AsJson = False,
) -> None:
    """Approve or reject a profile, or show its approval.

    Any later edit of the profile voids its approval. --reject, --note and --as-edited
    require --by.
    """
    from autotune.base.answer_json import answer_json
    from autotune.profiles.approval import read_with_approval, review
    from autotune.profiles.review_text import review_text

    if by is None and (reject or note is not None or as_edited):
        raise UsageError(
            "--reject, --note and --as-edited require --by", next_step="Add --by NAME"
        )
    if by is not None:
        review(
            profile,
            reports,
            decision="rejected" if reject else "approved",
            by=by,
            note=note,
            as_edited=as_edited,
        )
    stored = read_with_approval(profile, reports)
    if as_json:
        answer = {
            "profile": str(profile),
            "intact": stored.intact,
            "approval": stored.approval,
        }
        print(answer_json(answer))
    else:
        print(review_text(str(profile), stored.approval, intact=stored.intact))
