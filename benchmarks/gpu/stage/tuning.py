"""Stage ``tune``: ``autotune tune`` end to end, as a user types it, to profiles and a report.

On a card with more memory than an H100 NVL the tuning is for that card, whose memory it then keeps to. Everything that
it writes goes into one archive, also when it is cut off: the next check in the same directory goes on from there, with
the same command.
"""

import json
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from autotune.core.profile import Profile
from autotune.errors import AutotuneError
from autotune.search.profiles import read_profile
from benchmarks.gpu.check.children import Ended
from benchmarks.gpu.check.results import Sheet
from benchmarks.gpu.check.rig import NoTimeLeft, Rig, TimeBox, check_end, say
from benchmarks.gpu.stage.memory import IMITATED, imitated_card

ARCHIVE_NAME = "tune.zip"
PROFILES, REPORTS, DATA = "profiles", "reports", "data"
TIME_SHARE = 0.85
"""Of the box, for ``--minutes``: probes and the report take what they take."""
LEAST_MINUTES = 0.1


def measure(rig: Rig, sheet: Sheet, box: TimeBox) -> None:
    """Tune all models, and read what the profiles say.

    Raises:
        NoTimeLeft: If it was cut off, or left something open for want of time.
        TrialFailed: If it failed.
    """
    place, archive = rig.scratch / "tune", rig.out / ARCHIVE_NAME
    place.mkdir()
    earlier = rig.go_on("tune", sheet)
    if earlier and archive.is_file():
        with zipfile.ZipFile(archive) as packed:
            packed.extractall(place)
    # By a name of its own: where the dataset lies on this machine is nobody's business.
    (place / DATA).symlink_to(rig.data.resolve())
    answer = place / "answer.json"
    minutes = min(rig.sizes.tune_most_minutes, max(LEAST_MINUTES, TIME_SHARE * box.left_s / 60))
    arguments = ["-m", "autotune", *tune_arguments(rig, minutes)]
    sheet.details["command"] = ["autotune", *arguments[2:]]
    began_s = rig.clock.monotonic_s()
    ended = rig.programs.run(arguments, box.left_s, lambda line: say(f"  {line}"), cwd=place, stdout=answer)
    spent_s = rig.clock.monotonic_s() - began_s + (earlier.details.get("spent_s", 0.0) if earlier else 0.0)
    profiles = dict(_profiles(place / PROFILES))
    _pack(place, archive)
    for name, profile in profiles.items():
        _write_profile(sheet, name, profile)
    sheet.details |= {"spent_s": spent_s, "stages": _result(answer).get("stages", [])}
    sheet.measured("profiles_count", len(profiles), expected=len(rig.sizes.tuned_models))
    sheet.measured("commands_s", spent_s)
    # A tuning that time ended takes the time that it was given, whatever that was: it is no measure of a tuning.
    open_ = _open(rig, profiles, sheet.details["stages"], ended)
    sheet.measured("all_models_s", None if open_ else spent_s, lacking=open_)
    waits = [wait for wait in map(_data_wait_share, profiles.values()) if wait is not None]
    sheet.measured("chosen_data_wait_share", None if open_ else max(waits), lacking=open_)
    check_end(ended)
    if open_ and minutes < rig.sizes.tune_most_minutes:
        raise NoTimeLeft(open_)  # and another check goes on from here


def _open(rig: Rig, profiles: Mapping[str, Profile], stages: Sequence[Mapping[str, Any]], ended: Ended) -> str:
    """What the tuning left open, in words; empty for nothing."""
    if ended.exit_code or ended.cut_off or len(profiles) < len(rig.sizes.tuned_models):
        return "it was not finished"
    if failed := [f"{one['name']} of {one['model']}" for one in stages if one["status"] == "failed"]:
        return f"failed: {', '.join(failed)}"
    workers = {name: profile.evidence.workers for name, profile in profiles.items()}
    if untuned := [name for name, found in workers.items() if found is None or found.undecided_between]:
        return f"its time ended before the loader workers of {', '.join(untuned)} were decided"
    return ""


def tune_arguments(rig: Rig, minutes: float) -> list[str]:
    """After ``autotune``."""
    models = [word for model in rig.sizes.tuned_models for word in ("--model", model)]
    words = ["tune", *models, "--data", DATA, "--out", PROFILES, "--reports", REPORTS, "--here", "--json"]
    words += ["--device", rig.site.device, "--minutes", f"{minutes:.2f}", "--attention-dropout", "0"]
    words += ["--window", f"{rig.sizes.window_s:g}", "--seq-length", str(rig.sizes.seq_length_tokens)]
    words += ["--gpu", IMITATED] if imitated_card(rig.site) else []
    tiny_bytes = rig.sizes.memory_budget_bytes
    return words + (["--memory", f"{tiny_bytes // 2**20}MiB"] if tiny_bytes else [])


def _profiles(place: Path) -> Iterator[tuple[str, Profile]]:
    for path in sorted(place.glob("*.toml")):
        try:
            yield path.stem, read_profile(path).profile
        except AutotuneError as error:
            say(f"  {path.name}: {error.message}")


def _write_profile(sheet: Sheet, name: str, profile: Profile) -> None:
    """What it decided, and its evidence."""
    train, probe, workers = profile.train, profile.evidence.probe, profile.evidence.workers
    key = name.replace("-", "_")
    sheet.measured(f"{key}_micro_batch_rows_count", train.micro_batch_rows)
    if probe is not None:
        sheet.measured(f"{key}_largest_rows_count", probe.feasible_max)
    sheet.measured(f"{key}_data_wait_share", _data_wait_share(profile), lacking="loader workers were not tuned")
    if workers is not None:
        sheet.measured(f"{key}_loader_workers_count", workers.chosen)


def _data_wait_share(profile: Profile) -> float | None:
    workers = profile.evidence.workers
    if workers is None:
        return None
    return next(row.data_wait_share for row in workers.rows if row.loader_workers == workers.chosen)


def _result(answer: Path) -> dict[str, Any]:
    text = answer.read_text() if answer.is_file() else ""
    found: dict[str, Any] = json.loads(text) if text.strip() else {}
    return found


def _pack(place: Path, archive: Path) -> None:
    """Profiles, ledgers and reports as one file, as results come back flat."""
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as packed:
        for part in (PROFILES, REPORTS):
            for number, path in enumerate(sorted((place / part).rglob("*"))):
                if path.is_file():
                    # Ledgers are named after the host that wrote them; whichever it was, all of a directory are read.
                    named = path.with_name(f"{number}.jsonl") if path.suffix == ".jsonl" else path
                    packed.write(path, named.relative_to(place))
