"""``autotune advise``: recommended changes and their evidence, largest gain first."""

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autotune.console.options import (
    NODES,
    REPORTS,
    AsJson,
    ProfileData,
    Reports,
    flag,
    option,
    profiles,
)
from autotune.errors import ProfileRejected, UsageError

if TYPE_CHECKING:
    from autotune.advice.decide.context import TrainingContext
    from autotune.evidence.advice import Advice

_RUNS, _PROFILES = Path("runs"), Path("profiles")
_PLACE_HELP = (
    "Run, profile or raw data. Default: the newest run, else the only profile."
)


def advise(
    *,
    place: Annotated[
        Path | None,
        typer.Argument(
            metavar="RUN|PROFILE|DATA", help=_PLACE_HELP, autocompletion=profiles
        ),
    ] = None,
    profile: Annotated[
        Path | None,
        typer.Argument(
            metavar="PROFILE",
            help="Profile that started the run.",
            autocompletion=profiles,
        ),
    ] = None,
    data: ProfileData = None,
    nodes: Annotated[int | None, NODES] = None,
    rules: Annotated[bool, flag("--rules", "List the rules and exit.")] = False,
    apply: Annotated[
        bool, flag("--apply", "Write the safe changes into a new profile.")
    ] = False,
    out: Annotated[
        Path | None,
        option("PATH", "New profile, with --apply. Default: PROFILE.advised.toml."),
    ] = None,
    reports: Reports = REPORTS,
    as_json: AsJson = False,
) -> None:
    """Find the bottleneck and recommend changes.

    Each recommendation has evidence, expected gain, cost, and the exact command.
    """
    from autotune.advice.decide.rules import RULES
    from autotune.advice.decide.rules import advise as find_advice
    from autotune.advice.read_context import context_of, with_predicted_gains
    from autotune.advice.sections import advice_text, rules_text
    from autotune.base.answer_json import answer_json
    from trainer.formats.progress import progress
    from trainer.formats.run_record import RUN_FILE

    if rules:
        said = [
            {"rule": one.name, "covers": one.covers, "looks_for": one.looks_for}
            for one in RULES
        ]
        print(answer_json({"rules": said}) if as_json else rules_text(RULES))
        return
    where = place or _default_place()
    # An option without effect is a misunderstanding, and must not be ignored.
    idle = {
        f"{str(profile)!r} requires a run before it, and {str(where)!r} is none": (
            profile is not None and not (where / RUN_FILE).is_file()
        ),
        f"--nodes {nodes} requires a profile, and {str(where)!r} is none": (
            nodes is not None and not where.is_file()
        ),
        f"--out {str(out)!r} requires --apply": out is not None and not apply,
    }
    for message, applies in idle.items():
        if applies:
            raise UsageError(
                message, next_step="Remove it, or see: autotune advise --help"
            )
    now = context_of(
        where,
        profile=profile,
        data=data,
        nodes=nodes,
        reports=reports,
        candidates=_profiles(),
    )
    with progress("advise") as update:
        now = with_predicted_gains(now, update)
    found = find_advice(now)
    applied = _apply(now, found, out) if apply else None
    answer = {
        "subject": where,
        "bottleneck": now.bottleneck,
        "kernels": now.step_kernels,
        "advice": found,
        "not_judged": now.not_judged,
        "applied": applied,
    }
    told = advice_text(
        found, now.bottleneck, now.step_kernels, not_judged=now.not_judged
    )
    text = f"{where}\n\n{told}"
    if applied is not None:
        text += _applied_text(applied)
    print(answer_json(answer) if as_json else text)


def _default_place() -> Path:
    """Return the newest run or, without any run, the only profile."""
    from trainer.formats.run_record import RUN_FILE

    runs = sorted(
        (path.parent for path in _RUNS.glob(f"*/{RUN_FILE}")),
        key=lambda path: path.stat().st_mtime,
    )
    found = runs[-1:] or _profiles()
    if len(found) == 1:
        return found[0]
    several, none = (
        f"there are {len(found)} profiles in",
        f"there is no run in {_RUNS}/ and no profile in",
    )
    next_step = (
        "Name one: autotune advise PROFILE, or autotune advise RUN. To write a profile:"
        " autotune tune "
    )
    raise UsageError(
        f"{several if found else none} {_PROFILES}/",
        next_step=f"{next_step}--model MODEL --data DIR",
    )


def _profiles() -> list[Path]:
    """Return the profiles that tuning wrote.

    Backups, and profiles that advice wrote, are left out.
    """
    return sorted(
        path
        for path in _PROFILES.glob("*.toml")
        if not path.stem.endswith((".previous", ".advised"))
    )


def _apply(
    now: "TrainingContext", found: "tuple[Advice, ...]", out: Path | None
) -> dict[str, Any]:
    """Write the profile's safe changes into another profile.

    Returns:
        The written ``profile``, or None if no change is safe; the profile that it is
        made ``of``; ``kept``, the backup of a replaced file, or None; and the
        ``changes`` as text.

    Raises:
        UsageError: If there is no profile, or ``out`` is the profile itself.
        ProfileRejected: If the profile was modified after it was measured.
    """
    from autotune.advice.decide.apply import apply_advice, safe_changes
    from autotune.advice.sections import change_text
    from autotune.profiles.decide.follow_up import probe_command
    from autotune.profiles.profile_paths import rebase_data_path
    from autotune.profiles.store import write_profile
    from trainer.formats.events import utc_now

    if now.profile is None:
        next_step = (
            "Name it: autotune advise PROFILE --apply, or autotune advise RUN PROFILE"
            " --apply"
        )
        raise UsageError("--apply requires a profile", next_step=next_step)
    if not now.intact:
        what = (
            f"--apply cannot be used with {str(now.profile_path)!r}: it was modified"
            " after it was measured"
        )
        verify = shlex.join(["autotune", "profile", "verify", now.profile_path])
        again = probe_command(now.profile, now.profile_path)
        raise ProfileRejected(
            what,
            next_step=f"Measure again: {again}; or see the changes: {verify}",
        )
    changes = safe_changes(now.profile, found)
    old = Path(now.profile_path)
    if not changes:
        return {"profile": None, "of": old, "kept": None, "changes": ()}
    path = out or old.with_suffix(".advised.toml")
    if path.exists() and path.samefile(old):
        raise UsageError(
            f"--out {str(path)!r} is the profile itself",
            next_step="Name another file with --out.",
        )
    kept = write_profile(
        path, rebase_data_path(apply_advice(now.profile, changes, utc_now()), old, path)
    )
    return {
        "profile": path,
        "of": old,
        "kept": kept,
        "changes": [change_text(change) for change in changes],
    }


def _applied_text(applied: dict[str, Any]) -> str:
    if applied["profile"] is None:
        return "\n\nno change is safe without a measurement: the profile is unchanged"
    changes = "\n".join(f"  {change}" for change in applied["changes"])
    kept = (
        ""
        if applied["kept"] is None
        else f"\nthe previous file is kept as {applied['kept']}"
    )
    command = shlex.join(
        ["autotune", "compare", str(applied["of"]), str(applied["profile"])]
    )
    return f"\n\nwrote {applied['profile']}:\n{changes}{kept}\nnext: {command}"
