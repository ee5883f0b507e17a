"""Report blocks on how to repeat the measurements of a profile."""

import shlex

from autotune.base.document import (
    Block,
    Bullets,
    Code,
    Paragraph,
    Strong,
    Words,
    facts_table,
)
from autotune.base.tables import Row
from autotune.profiles.decide.follow_up import (
    probe_command,
    repeated_probe_command,
    workers_command,
)
from autotune.profiles.reported_profile import ReportedProfile
from autotune.profiles.review_text import trial_log_words
from trainer.formats.presets import PRESETS


def reproduction_blocks(reported: ReportedProfile) -> tuple[Block, ...]:
    """Return the commands that repeat the measurements, and the hashes to compare."""
    instructions = (
        "Run in this order, on the same machine, dataset and versions; paths are"
        " relative to the directory in which the report was built."
    )
    if reported.profile.has_train and reported.data is None:
        instructions += " DIR is the dataset."
    words: Words = (instructions,)
    if not reported.intact:
        warning = Strong(text="The profile was modified after it was written.")
        words = (*words, " ", warning)
    commands = tuning_commands(reported)
    return (
        Paragraph(words=words),
        Bullets(items=tuple((Code(text=command),) for command in commands)),
        facts_table("Identifiers of this tuning", _identifier_rows(reported)),
    )


def _identifier_rows(reported: ReportedProfile) -> list[Row]:
    """Return the hashes, time, versions and seed that identify the tuning."""
    provenance = reported.profile.provenance
    compared = None
    if reported.trial_log is not None:
        compared = trial_log_words(reported.trial_log)
    commands = ", ".join(provenance.commands)
    profile = reported.profile
    subject: list[Row] = [
        [f"source of the {role}, hash", sha256]
        for role, sha256 in profile.subject.sources.items()
    ]
    if profile.has_train:
        subject = [
            ["model config, hash", profile.fingerprint.model_sha256],
            ["dataset, hash", profile.fingerprint.dataset_hash],
            ["seed", str(profile.train.seed)],
        ]
    return [
        ["profile", str(reported.path)],
        ["profile, hash of its content", reported.content_sha256],
        ["trials, hash", provenance.trial_log_sha256],
        ["compared with the trial log", compared],
        *subject,
        ["written", provenance.created_utc],
        ["written by", f"encoder-autotune {provenance.tool_version}: {commands}"],
        ["SLURM job", provenance.slurm_job_id],
    ]


def tuning_commands(reported: ReportedProfile) -> list[str]:
    """Return the commands that tuned the profile with its settings, oldest first."""
    profile = reported.profile
    commands = _own_commands(reported)
    if profile.has_train:
        commands = _trainer_commands(reported)
    # A foreign profile may name anything as a command; only this program's are shown.
    names = dict.fromkeys(profile.provenance.commands)
    return [commands[name] for name in names if name in commands]


def _own_commands(reported: ReportedProfile) -> dict[str, str]:
    """Return the commands that measure code of yours, by their names."""
    return {
        "probe": probe_command(reported.profile, reported.path),
        "workers": workers_command(reported.profile, reported.path),
    }


def _trainer_commands(reported: ReportedProfile) -> dict[str, str]:
    """Return the commands that tune the bundled trainer, by their names."""
    profile = reported.profile
    probe = profile.evidence.probe
    data = "DIR" if reported.data is None else str(reported.data)
    data_option = shlex.join(["--data", data])
    data_and_ranks = data_option
    if probe is not None:
        data_and_ranks += f" --ranks {probe.local_ranks}"
    # The profile holds the shape of a model that has no preset.
    model = reported.name if reported.name in PRESETS else str(reported.path)
    return {
        "probe": repeated_probe_command(
            profile.train, profile, model=model, data=data, out=reported.path
        ),
        "workers": f"autotune workers {reported.quoted} {data_and_ranks}",
        "network": f"autotune network {reported.quoted} {data_option}",
        "confirm": f"autotune confirm {reported.quoted} {data_and_ranks}",
        "baseline": f"autotune baseline {reported.quoted} {data_and_ranks}",
        "advise": f"autotune advise {reported.quoted} --apply",
    }
