"""A tuning for a card that is not here: what is predicted of it becomes profiles, and says that it was not measured."""

import shlex
from pathlib import Path

from autotune.core.tuning import Stage, TuningResult
from autotune.core.units import format_bytes, format_count
from autotune.errors import AutotuneError
from autotune.measure.clock import SystemClock
from autotune.measure.host import SystemHost
from autotune.measure.nvml import NvmlMonitor
from autotune.search.estimated import ProfilesAsked, profile_places, write_profiles
from autotune.search.prediction import Asked, Choices, find_target, predict
from autotune.search.site import open_site
from autotune.tuning.tune import ORDER, TuneAsked
from trainer.progress import progress


def card_is_elsewhere(asked: TuneAsked) -> bool:
    """Whether a card was named, and there is no GPU to measure on or to stand in for it.

    Raises:
        MachineLacks: If a GPU is to be measured, and there is none.
    """
    if asked.probe.as_card is None:
        return False
    monitor = NvmlMonitor()
    try:
        return open_site(asked.device, asked.probe.data, SystemHost(), monitor).gpu is None
    finally:
        monitor.close()


def predict_instead(asked: TuneAsked) -> tuple[TuningResult, list[AutotuneError]]:
    """Write a predicted profile of each model; every other stage waits for the card.

    Returns:
        What came of it, and why models were refused, if any were.
    """
    clock, probe = SystemClock(), asked.probe
    card = probe.as_card
    assert card is not None
    began_s = clock.monotonic_s()
    what = Asked(
        models=probe.models,
        gpu=card.key,
        memory=None if probe.memory_bytes is None else f"{probe.memory_bytes}B",
        device="cuda",
        data=probe.data,
        vocab_size=1,
        seq_length_tokens=probe.seq_length_tokens,
        ranks=probe.ranks or 1,
        accumulate=probe.accumulate,
        tensor_ranks=1,
        pipeline_stages=1,
        max_rows=probe.max_rows,
    )
    choices = Choices(
        layout=None if probe.layout is None or probe.layout == "bucketed" else probe.layout,
        precision=probe.precision or "bf16",
        attention=probe.attention,
        attention_dropout=probe.attention_dropout,
        checkpointing=probe.checkpointing,
        head="masked",
    )
    target = find_target(what)
    wish = ProfilesAsked(
        asked=what,
        target=target,
        out=probe.out or Path("profiles"),
        headroom_share=probe.headroom_share,
        global_batch_tokens=probe.global_batch_tokens,
    )
    places = profile_places(wish, choices)
    with progress("tune: estimate") as update:
        answer = predict(what, choices, target, what_if=False, update=update)
    written = write_profiles(answer, wish, places)
    stages = [
        Stage(
            name="estimate",
            model=one.config.model.name,
            status="done",
            told=f"{format_count(one.rows)} rows predicted to fit {format_bytes(one.budget_bytes)}",
        )
        for one in answer.predicted
    ]
    stages += [Stage(name="estimate", model=name, status="failed", told=str(error)) for name, error in answer.refused]
    absent = f"not measured: there is no {card.name} here"
    stages += [
        Stage(name=name, model=one.name, status="skipped", told=absent) for one in probe.models for name in ORDER[1:-1]
    ]
    seconds = round(clock.monotonic_s() - began_s, 3)
    profiles = tuple(str(one.path) for one in written)
    result = TuningResult(
        profiles=profiles,
        report=None,
        stages=tuple(stages),
        seconds=seconds,
        seconds_in_children=0.0,
        next_steps=_next_steps(profiles, asked.nodes),
    )
    return result, [error for _, error in answer.refused]


def _next_steps(profiles: tuple[str, ...], nodes: int) -> tuple[str, ...]:
    if not profiles:
        return ()
    first = shlex.quote(profiles[0])
    return (
        f"autotune plan --profile {first} --nodes {nodes} --epochs 1",
        f"autotune profile explain {first}",
        "the same command where the card is, with --slurm from a login node",
    )
