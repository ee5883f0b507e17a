"""``autotune profile``: show, explain, verify, approve and export a profile.

Each command imports its own modules when it runs, so that help and the completion of a
shell start without them.
"""

import contextlib
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from autotune.base.tables import printable_line
from autotune.console import options as opt
from autotune.errors import UsageError
from autotune.subjects.mlm.export.targets import TargetName

if TYPE_CHECKING:
    from collections.abc import Mapping

    from autotune.evidence.profile import Argument
    from autotune.profiles.approval import ProfileWithApproval
    from autotune.profiles.checks import Verification
    from autotune.subjects.mlm.export.table import Export

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


@app.command("export")
def export(
    *,
    profile: opt.OneProfile,
    to: Annotated[
        TargetName,
        opt.option(
            None,
            "Target: TrainingArguments, accelerate's config file, or Lightning's"
            " Trainer arguments.",
        ),
    ],
    out: Annotated[
        Path | None,
        opt.option(
            "PATH",
            "JSON file to write, with PATH.remarks.json beside it. Default: print.",
        ),
    ] = None,
    nodes: Annotated[int, opt.NODES] = 1,
    ranks: opt.NodeRanks = None,
    data: opt.ProfileData = None,
    as_json: opt.AsJson = False,
) -> None:
    """Export a profile to another trainer.

    Standard error lists the settings that differ or have no equivalent, and code to add
    to your program.
    """
    from autotune.launch.training_job import default_ranks
    from autotune.memory.contents import sequence_means
    from autotune.profiles.store import read_profile
    from autotune.subjects.mlm.export.translate import export_profile

    stored = read_profile(profile)
    if not stored.profile.has_train:
        _export_own(stored.profile.settings, to, out, as_json=as_json)
        return
    result = export_profile(
        stored.profile,
        sequence_means(stored, data),
        to,
        nodes=nodes,
        ranks_per_node=ranks or default_ranks(stored.profile),
    )
    _write_export(result, out, as_json=as_json)


def _write_export(result: "Export", out: Path | None, *, as_json: bool) -> None:
    """Write the settings and remarks of an export to files, or print them.

    Args:
        result: Export to write.
        out: File of settings; the remarks go to a file beside it.
        as_json: True to print the whole export, without text on standard error.
    """
    from autotune.base.answer_json import answer_json
    from autotune.base.files import write_atomically
    from autotune.subjects.mlm.export.text import export_text

    answer = answer_json(result)
    if not as_json:
        sys.stderr.write(f"{export_text(result)}\n")
    settings_json = json.dumps(result.arguments, indent=2)
    shown = settings_json
    if out is not None:
        remarks = out.with_name(f"{out.stem}.remarks.json")
        write_atomically(out, f"{settings_json}\n")
        write_atomically(remarks, f"{answer}\n")
        shown = f"settings: {out}\nremarks:  {remarks}"
    print(answer if as_json else shown)


def _export_own(
    settings: "Mapping[str, Argument]",
    target: TargetName,
    out: Path | None,
    *,
    as_json: bool,
) -> None:
    """Export the settings of your own training code.

    Args:
        settings: Tuned values by argument.
        target: Trainer to export to.
        out: File of settings to write, if the target takes any in a file; None prints
            them.
        as_json: True to print settings and code as JSON.
    """
    from autotune.base.answer_json import answer_json
    from autotune.base.files import write_atomically
    from autotune.subjects.mlm.export.translate import export_own_values

    arguments, calls = export_own_values(target, settings)
    if calls:
        sys.stderr.write("Add to your program:\n")
        for call in calls:
            sys.stderr.write(f"  {printable_line(call)}\n")
    settings_json = json.dumps(arguments, indent=2)
    shown = settings_json
    if not arguments:
        shown = (
            f"settings: none are in a file of {target}; all are code for your program"
        )
    elif out is not None:
        write_atomically(out, f"{settings_json}\n")
        shown = f"settings: {out}"
    if as_json:
        shown = answer_json({"arguments": arguments, "calls": calls})
    print(shown)
