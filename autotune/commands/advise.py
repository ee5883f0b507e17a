"""``autotune advise``: what to change, with evidence, ranked by what it is expected to gain."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autotune.commands.options import REPORTS, AsJson, Reports
from autotune.errors import BadInput, UsageError

if TYPE_CHECKING:
    from autotune.core.advice import Advice
    from autotune.decide.advice import Situation

_RUNS, _PROFILES = Path("runs"), Path("profiles")


def advise(
    *,
    place: Annotated[
        Path | None,
        typer.Argument(
            metavar="[PROFILE|RUN|DATA]",
            help="A profile, a run, or a directory with data. Default: the newest run, else the only profile.",
        ),
    ] = None,
    profile: Annotated[Path | None, typer.Option(help="The profile that a run was started from.")] = None,
    data: Annotated[
        Path | None, typer.Option(help="Dataset directory. Default: the profile's.", envvar="AUTOTUNE_DATA")
    ] = None,
    nodes: Annotated[int | None, typer.Option(min=1, help="As many nodes as are meant. Default: as measured.")] = None,
    hf_args: Annotated[
        Path | None,
        typer.Option("--hf-args", help="Look at another trainer's settings: transformers' arguments, as JSON."),
    ] = None,
    rules: Annotated[bool, typer.Option("--rules", help="List what is looked for, and nothing else.")] = False,
    apply: Annotated[bool, typer.Option("--apply", help="Write the safe changes into a new profile.")] = False,
    out: Annotated[
        Path | None, typer.Option(help="With --apply: the new profile. Default: PROFILE.advised.toml.")
    ] = None,
    reports: Reports = REPORTS,
    as_json: AsJson = False,
) -> None:
    """Say what limits a training and what to change, with evidence, expected gain, cost, and the command."""
    from autotune.decide.advice import RULES
    from autotune.decide.advice import advise as find_advice
    from autotune.search.situation import with_foreign
    from autotune.show.advice import advice_json, advice_text, rules_json, rules_text

    if rules:
        print(json.dumps(rules_json(RULES), indent=2) if as_json else rules_text(RULES))
        return
    where = place or _default_place()
    now = with_foreign(_situation(where, profile, data, nodes, reports), hf_args)
    found = find_advice(now)
    applied = _apply(now, found, out) if apply else None
    if as_json:
        print(json.dumps({"subject": str(where), **advice_json(found, now.bottleneck), "applied": applied}, indent=2))
        return
    print(f"{where}\n\n{advice_text(found, now.bottleneck)}{_applied_text(applied)}")


def _situation(place: Path, profile: Path | None, data: Path | None, nodes: int | None, reports: Path) -> "Situation":
    from autotune.decide.advice import Situation
    from autotune.measure.host import SystemHost
    from autotune.search.profiles import read_profile
    from autotune.search.situation import (
        data_facts,
        profile_of_run,
        read_trials,
        situation_of_profile,
        situation_of_run,
    )
    from trainer.record import RUN_FILE, read_run

    host = SystemHost()
    if place.is_file():
        trials = read_trials(place, reports)
        return situation_of_profile(read_profile(place), trials.finished, host, data=data, nodes=nodes)
    if (place / RUN_FILE).is_file():
        run = read_run(place)
        stored = read_profile(profile) if profile is not None else profile_of_run(run, sorted(_PROFILES.glob("*.toml")))
        return situation_of_run(run, host, stored=stored, data=data)
    facts = data_facts(place, host)
    if facts is None or not (facts.prepared or facts.kinds):
        raise BadInput(
            f"{place} is no profile, no run, and holds no data that could be trained on",
            next_step="Name a profile (profiles/….toml), a run (runs/…) or a directory with data.",
        )
    return Situation(train=None, data=facts)


def _default_place() -> Path:
    """The newest run; else the profile, where there is but one."""
    from trainer.record import RUN_FILE

    runs = sorted((path.parent for path in _RUNS.glob(f"*/{RUN_FILE}")), key=lambda path: path.stat().st_mtime)
    if runs:
        return runs[-1]
    profiles = sorted(_PROFILES.glob("*.toml"))
    if len(profiles) == 1:
        return profiles[0]
    there = (
        f"{len(profiles)} profiles in {_PROFILES}/"
        if profiles
        else f"no run in {_RUNS}/ and no profile in {_PROFILES}/"
    )
    raise UsageError(f"there is {there}", next_step="Name one: autotune advise PROFILE, or autotune advise RUN.")


def _apply(now: "Situation", found: "tuple[Advice, ...]", out: Path | None) -> dict[str, Any]:
    """Write the safe changes into a new profile; nothing where there are none."""
    from autotune.core.profile import profile_to_toml
    from autotune.decide.advice.apply import safe_changes
    from autotune.search.profiles import with_advice
    from autotune.show.advice import change_text
    from autotune.store import write_atomically

    if now.profile is None:
        raise UsageError(
            "--apply needs a profile to change, and none is known here",
            next_step="Name it: autotune advise PROFILE --apply, or autotune advise RUN --profile PROFILE --apply.",
        )
    changes = safe_changes(found)
    if not changes:
        return {"profile": None, "changes": []}
    path = out or Path(now.profile_path).with_suffix(".advised.toml")
    if path.exists() and path.samefile(now.profile_path):
        raise UsageError(f"--out {path} is the profile itself", next_step="Name another file; the old one stays.")
    write_atomically(path, profile_to_toml(with_advice(now.profile, changes)))
    return {"profile": str(path), "changes": [change_text(change) for change in changes]}


def _applied_text(applied: dict[str, Any] | None) -> str:
    if applied is None:
        return ""
    if applied["profile"] is None:
        return "\n\nno change is safe to be written without measuring: the profile is as it was"
    changes = "\n".join(f"  {change}" for change in applied["changes"])
    return f"\n\nwrote {applied['profile']}:\n{changes}\nnext: autotune profile diff OLD {applied['profile']}"
