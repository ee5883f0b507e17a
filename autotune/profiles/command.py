"""``autotune profile``: show and explain a profile, verify it on this machine, approve and export it."""

import contextlib
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from autotune.base.tables import printable_line, text_table
from autotune.base.units import format_count
from autotune.console import options as opt
from autotune.errors import UsageError

if TYPE_CHECKING:
    from autotune.profiles.decide.export.table import Export

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
    from autotune.advice.sections import explanation_text, explanations_text
    from autotune.base.document import answer_json, jsonable
    from autotune.integrations.sections import own_profile_text
    from autotune.integrations.store import StoredOwn, read_either
    from autotune.profiles.decide.explain import explanations, select_explanations
    from autotune.profiles.sections import profile_text
    from autotune.search.sections import exploration_text

    stored = read_either(profile, reports)
    if key is not None or explain:
        if isinstance(stored, StoredOwn):
            next_step = f"Show it: autotune profile show {profile}"
            raise UsageError(
                "KEY and --explain are not for profiles of your own training code",
                next_step=next_step,
            )
        found = explanations(stored.profile)
        chosen = found if key is None else select_explanations(found, key)
        if as_json:
            print(answer_json(chosen))
            return
        print(
            explanations_text(chosen)
            if key is None
            else "\n\n".join(map(explanation_text, chosen))
        )
        if key is None and stored.profile.evidence.explore is not None:
            print(f"\n{exploration_text(stored.profile.evidence.explore)}")
    elif as_json:
        print(
            answer_json(
                {
                    **jsonable(stored.profile),
                    "intact": stored.intact,
                    "approval": stored.approval.state,
                }
            )
        )
    elif isinstance(stored, StoredOwn):
        print(own_profile_text(stored.profile, stored.approval, intact=stored.intact))
    else:
        print(profile_text(stored.profile, stored.approval, intact=stored.intact))


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
    from autotune.base.document import answer_json
    from autotune.integrations.review import verify_own
    from autotune.integrations.store import StoredOwn, read_either
    from autotune.machine.host import SystemHost
    from autotune.machine.nvml import NvmlMonitor
    from autotune.profiles import approval
    from autotune.profiles.sections import verification_text
    from autotune.profiles.store import read_trials
    from autotune.trials.fork_server import ForkServerMachine

    def read_cuda() -> str | None:
        with ForkServerMachine() as server:
            server.start()
            return server.versions.get("cuda")

    stored = read_either(profile, reports)
    trial_log = read_trials(profile, stored.profile, reports).check
    with contextlib.closing(NvmlMonitor()) as monitor:
        if isinstance(stored, StoredOwn):
            found = verify_own(stored, SystemHost(), monitor, read_cuda)
        else:
            found = approval.verify(stored, data, SystemHost(), monitor, read_cuda)
    if as_json:
        said = {
            "profile": profile,
            "intact": stored.intact,
            "approval": stored.approval.state,
        }
        print(answer_json({**said, "trial_log": trial_log, "checks": found.checks}))
    else:
        print(
            verification_text(found, trial_log, stored.approval, intact=stored.intact)
        )
    if require_approved or stored.approval.state in ("rejected", "voided"):
        approval.reject_unapproved(stored, profile, reports)
    found.raise_if_bad(str(profile))


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
    from autotune.base.document import answer_json
    from autotune.integrations.store import read_either
    from autotune.profiles.approval import review as keep
    from autotune.profiles.sections import review_text

    if by is None and (reject or note is not None or as_edited):
        raise UsageError(
            "--reject, --note and --as-edited require --by", next_step="Add --by NAME"
        )
    decision: Literal["approved", "rejected"] = "rejected" if reject else "approved"
    if by is not None:
        keep(
            profile,
            reports,
            decision,
            by=by,
            note=note,
            as_edited=as_edited,
            read=read_either,
        )
    found = read_either(profile, reports)
    if as_json:
        print(
            answer_json(
                {
                    "profile": str(profile),
                    "intact": found.intact,
                    "approval": found.approval,
                }
            )
        )
    else:
        print(review_text(str(profile), found.approval, intact=found.intact))


@app.command("export")
def export(
    *,
    profile: opt.OneProfile,
    to: Annotated[
        Literal["hf-trainer", "accelerate", "lightning"],
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
    from autotune.base.document import answer_json
    from autotune.base.files import write_atomically
    from autotune.integrations.store import is_own, read_own
    from autotune.launch.training_job import default_ranks
    from autotune.memory.estimate import sequence_means
    from autotune.profiles.decide.export import export_profile, own_export
    from autotune.profiles.store import read_profile

    own = is_own(profile)
    if own:
        arguments, calls = own_export(to, read_own(profile).profile.tuned)
        answer = answer_json({"arguments": arguments, "calls": calls})
        said = (
            "Add to your program:\n"
            + "".join(f"  {printable_line(call)}\n" for call in calls)
            if calls
            else ""
        )
    else:
        stored = read_profile(profile)
        each, means = (
            ranks or default_ranks(stored.profile),
            sequence_means(stored, data),
        )
        found = export_profile(
            stored.profile, means, to, nodes=nodes, ranks_per_node=each
        )
        arguments, answer, said = (
            found.arguments,
            answer_json(found),
            "" if as_json else f"{_export_text(found)}\n",
        )
    sys.stderr.write(said)
    text = json.dumps(arguments, indent=2)
    if own and not arguments:
        text = f"settings: none are in a file of {to}; all are code for your program"
    elif out is not None:
        write_atomically(out, f"{text}\n")
        text = f"settings: {out}"
        if not own:
            remarks = out.with_name(f"{out.stem}.remarks.json")
            write_atomically(remarks, f"{answer}\n")
            text += f"\nremarks:  {remarks}"
    print(answer if as_json else text)


def _export_text(export: "Export") -> str:
    """Format what the settings file cannot express.

    Settings that mean the same are only counted.
    """
    same = sum(
        one.equivalence == "same" and one.value is not None for one in export.settings
    )
    near, batch = (
        [one for one in export.settings if one.equivalence == "near"],
        export.batch,
    )
    values = [
        (
            f"{one.argument} = {json.dumps(one.value)}"
            if one.value is not None
            else one.argument
        )
        for one in near
    ]
    differ = [
        [one.setting, value or "", one.remark]
        for one, value in zip(near, values, strict=True)
    ]
    lost = [
        [one.setting, one.remark]
        for one in export.settings
        if one.equivalence == "none"
    ]
    tokens, exported = (
        format_count(one)
        for one in (batch.tokens_per_step, batch.exported_tokens_per_step)
    )
    parts = [
        (
            f"For {export.written_for} on {batch.ranks} GPUs: a step of"
            f" {batch.sequences_per_step:,} sequences with {tokens} non-padding tokens"
            f" becomes one of {batch.exported_samples_per_step:,} samples with"
            f" {exported}, in {batch.gradient_accumulation_steps} micro-batches of"
            f" {batch.per_device_batch_size} per GPU"
        ),
        f"{same} settings mean the same. These differ:",
        text_table(
            ("profile", export.written_for.partition(" ")[0], "difference"), differ
        ),
        "No equivalent:",
        text_table(("profile", "instead"), lost),
        "Add to the calling program:\n"
        + "\n".join(f"  {printable_line(call)}" for call in export.calls),
        "\n".join(f"warning: {printable_line(warning)}" for warning in export.warnings),
    ]
    return "\n\n".join(parts)
