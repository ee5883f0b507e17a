"""Text on a profile: its settings with their reasons, its machine and approval."""

from collections.abc import Iterator
from typing import Any

from autotune.base.answer_json import jsonable
from autotune.base.document import Pairs, Table, Words
from autotune.base.render_console import console_text
from autotune.base.tables import Row
from autotune.base.units import format_bytes, format_count
from autotune.base.wording import format_setting
from autotune.evidence.profile import Profile
from autotune.profiles.approval_record import Approval
from autotune.profiles.decide.batch_split import (
    DEFAULT_GLOBAL_BATCH_TOKENS,
    SPLIT_FACTORS,
    split_global_batch,
)
from autotune.profiles.decide.explain import explanations
from autotune.profiles.review_text import approval_line, content_state
from autotune.profiles.store import WrittenProfile
from trainer.formats.train_config import ParallelSettings


def profile_text(profile: Profile, approval: Approval, *, intact: bool) -> str:
    """Return a profile's settings with their reasons, its machine and approval.

    Args:
        profile: Profile to show.
        approval: Approval of its present content.
        intact: True if it was not edited since it was written.
    """
    table = Table(
        caption="",
        headers=("setting", "value", "why"),
        rows=tuple(_setting_rows(profile)),
    )
    machine = profile.fingerprint
    device_name = machine.gpu_name or machine.cpu_model or machine.device
    measured_on = (
        f"{device_name}, torch {machine.torch}, {profile.provenance.created_utc}"
    )
    pairs = (
        *_function_pairs(profile),
        ("measured on", (measured_on,)),
        ("content", (content_state(intact=intact),)),
        ("approval", (approval_line(approval),)),
    )
    return console_text((table, Pairs(pairs=pairs)))


def profile_answer(profile: Profile) -> dict[str, Any]:
    """Return the tables of a profile as JSON.

    The version of its format is left out: the document of a command has its own.
    """
    tables: dict[str, Any] = jsonable(profile)
    return {name: table for name, table in tables.items() if name != "schema_version"}


def written_answer(written: WrittenProfile) -> dict[str, Any]:
    """Return the JSON of a command: the profile, its path, and every trial.

    ``bytes_known`` tells how peaks of memory are known, such as ``measured``.
    """
    trials = [
        {
            "label": finished.label,
            "size": finished.trial.measured.get("size"),
            "seconds": round(finished.seconds, 3),
            "from_trial_log": finished.from_trial_log,
            "outcome": finished.outcome,
        }
        for finished in written.trials
    ]
    answer: dict[str, Any] = jsonable(
        {
            "profile": written.path,
            **profile_answer(written.profile),
            "bytes_known": written.profile.fingerprint.bytes_known,
            "trials": trials,
        }
    )
    return answer


def _function_pairs(profile: Profile) -> Iterator[tuple[str, Words]]:
    """Yield the names of your functions; nothing for the bundled trainer."""
    names = [profile.subject.function(role) for role in profile.subject.sources]
    functions = ", ".join(name for name in names if name is not None)
    if functions:
        yield "your code", (functions,)


def _setting_rows(profile: Profile) -> Iterator[Row]:
    """Yield each setting that tuning decides, with its value and reason."""
    if profile.has_train:
        yield from _trainer_rows(profile)
    else:
        for setting in explanations(profile):
            yield [setting.key, format_setting(setting.value), setting.because]
        yield from _missing_rows(profile)
    budget_bytes = profile.constraints.memory_budget_bytes
    if budget_bytes is not None:
        yield ["memory budget", format_bytes(budget_bytes), "per rank"]


def _missing_rows(profile: Profile) -> Iterator[Row]:
    """Yield the settings of your code that no command has measured."""
    if profile.evidence.probe is None:
        reason = "not measured: autotune probe --step"
        yield [profile.subject.size, None, reason]
    if profile.evidence.workers is None:
        yield ["num_workers", None, "not measured: autotune workers --loader"]


def _trainer_rows(profile: Profile) -> Iterator[Row]:
    """Yield each setting of the bundled trainer that tuning decides."""
    train = profile.train
    inputs = (
        f"{train.precision}, {train.layout} sequences of"
        f" {train.seq_length_tokens} tokens"
    )
    yield ["model", train.model.name, inputs]
    if train.attention_dropout is not None:
        dropout = f"{train.attention_dropout:g}"
        yield ["attention dropout", dropout, "set by you; changes the recipe"]
    probe = profile.evidence.probe
    yield [
        "micro-batch size",
        str(train.micro_batch_size),
        "not measured: autotune probe" if probe is None else probe.choice,
    ]
    tokens = profile.constraints.global_batch_tokens
    global_batch_reason = "set by you"
    if tokens is not None:
        global_batch_reason = f"about {global_batch_words(tokens)} per step"
    # A global batch with fewer sequences than ranks cannot be split.
    if train.global_batch_size >= profile.local_ranks:
        global_batch_reason = f"{_split_words(profile)}, {global_batch_reason}"
    yield ["global batch size", str(train.global_batch_size), global_batch_reason]
    workers = profile.evidence.workers
    yield [
        "DataLoader workers",
        str(train.data.num_workers),
        "not measured: autotune workers" if workers is None else workers.choice,
    ]
    yield from _gradient_sync_rows(profile)


def _split_words(profile: Profile) -> str:
    """Return the split of a profile's global batch, with the names of its factors."""
    train = profile.train
    ranks = profile.local_ranks
    split = split_global_batch(train.global_batch_size, train.micro_batch_size, ranks)
    return f"{split.words(ranks)} ({SPLIT_FACTORS})"


def _gradient_sync_rows(profile: Profile) -> Iterator[Row]:
    """Yield the rows on gradient synchronisation.

    Yields none if it was not measured and has the default settings.
    """
    parallel = profile.train.parallel
    network = profile.evidence.network
    if network is None and parallel == ParallelSettings():
        return
    strategy = "hsdp" if parallel.shard_ranks is not None else parallel.strategy
    settings = f"{strategy}, {parallel.gradient_dtype}"
    if parallel.strategy != "fsdp2":
        settings += f", {parallel.bucket_cap_mib} MiB buckets"
    yield [
        "gradient synchronisation",
        settings,
        "not measured: autotune network" if network is None else network.choice,
    ]
    if network is not None and network.useful_nodes is not None:
        reason = "predicted: at least 90 % efficient at this global batch"
        yield ["max. nodes", str(network.useful_nodes), reason]


def global_batch_words(tokens: int) -> str:
    """Format a global batch in tokens, and note whether it is the default."""
    origin = "the default" if tokens == DEFAULT_GLOBAL_BATCH_TOKENS else "set by you"
    return f"{format_count(tokens)} non-padding tokens ({origin})"
