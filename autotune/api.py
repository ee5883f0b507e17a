"""What other Python programs may call: six functions, which do what the commands of the same names do.

They return frozen values, print nothing, and raise ``AutotuneError`` with a message and a next step. Arguments are
keywords; paths may be text. This process never imports torch: what needs it runs in child processes. ``from autotune
import …`` loads a function when it is first asked for.
"""

import functools
from collections.abc import Callable
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Literal, ParamSpec, TypeVar

from autotune.core.defaults import MAX_ROWS, SEQ_LENGTH_TOKENS, VOCAB_SIZE

if TYPE_CHECKING:
    from autotune.core.advice import Advice
    from autotune.core.plan import Goal, GoalKind
    from autotune.core.tuning import StageName, TuningResult
    from autotune.decide.comparison import Comparison
    from autotune.decide.plan import Plan
    from autotune.decide.prediction import Predicted
    from autotune.search.profiles import StoredProfile
    from trainer.config import TrainConfig

_P = ParamSpec("_P")
_T = TypeVar("_T")
AnyPath = str | PathLike[str]


def _one_error(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Errors of the trainer's rooms, which files are read by, become this package's."""

    @functools.wraps(function)
    def called(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        from autotune.errors import BadInput
        from trainer.errors import TrainerError

        try:
            return function(*args, **kwargs)
        except TrainerError as error:
            raise BadInput(error.message, next_step=error.next_step) from error

    return called


@_one_error
def read_profile(*, path: AnyPath) -> "StoredProfile":
    """Read a profile and check every value of it.

    Args:
        path: The TOML file.

    Returns:
        The profile, where it lies, and whether it still says what it was written with.

    Raises:
        AutotuneError: If it is missing, or is no profile.

    >>> from autotune import read_profile
    >>> stored = read_profile(path="profiles/bert-mini-cpu.toml")
    >>> stored.intact, stored.profile.train.model.name, stored.profile.train.seq_length_tokens
    (True, 'bert-mini', 128)
    """
    from autotune.search.profiles import read_profile as read

    return read(Path(path))


@_one_error
def estimate(
    *,
    model: str,
    gpu: str | None = None,
    memory_bytes: int | None = None,
    device: Literal["cuda", "cpu"] = "cuda",
    data: AnyPath | None = None,
    vocab_size: int = VOCAB_SIZE,
    seq_length_tokens: int = SEQ_LENGTH_TOKENS,
    layout: Literal["packed", "bucketed", "padded"] | None = None,
    precision: Literal["bf16", "fp32"] | None = None,
    attention_dropout: float | None = None,
    checkpointing: Literal["none", "selective", "full"] = "none",
    head: Literal["masked", "dense"] = "masked",
    ranks: int = 1,
) -> "Predicted":
    """Predict the largest micro-batch that fits a card that is not here. Nothing is run; it takes some seconds.

    Args:
        model: A preset, or a transformers ``config.json``.
        gpu: The card, such as ``h100-nvl-94gb``; None takes the first of this machine.
        memory_bytes: Budget of one rank; a CPU needs one.
        device: What it is to run on.
        data: A dataset, for its vocabulary and what its rows hold.
        vocab_size: Without one.
        seq_length_tokens: Tokens in a row.
        layout: What a row holds; None packs where this project knows the architecture.
        precision: Of the matrix products; None is bf16 on a GPU, fp32 on a CPU.
        attention_dropout: Instead of the model's.
        checkpointing: Which activations are computed again in backward.
        head: Places that the prediction head computes.
        ranks: Data-parallel ranks.

    Returns:
        Rows, with what they may be at least and at most, and the ledger of the memory in bytes.

    Raises:
        AutotuneError: If the card or the model is unknown, or not even one row fits.

    >>> from autotune import estimate
    >>> found = estimate(model="bert-mini", device="cpu", memory_bytes=2**30, seq_length_tokens=128)
    >>> found.rows_low <= found.rows <= found.rows_high, found.ledger.peak_bytes <= 2**30
    (True, True)
    """
    from autotune.search.prediction import Asked, find_target, predict, settings_of_step
    from trainer.presets import model_settings

    config = settings_of_step(
        model_settings(model),
        device,
        layout=layout,
        precision=precision,
        seq_length_tokens=seq_length_tokens,
        attention_dropout=attention_dropout,
        checkpointing=checkpointing,
        head=head,
    )
    asked = Asked(
        configs=(config,),
        gpu=gpu,
        memory=None if memory_bytes is None else f"{memory_bytes}B",
        data=None if data is None else Path(data),
        vocab_size=vocab_size,
        ranks=ranks,
        accumulate=True,
        tensor_ranks=1,
        pipeline_stages=1,
        max_rows=MAX_ROWS,
    )
    answer, refused = predict(asked, find_target(asked), what_if=False, update=_quietly)
    for error in refused.values():
        raise error
    return answer.models[0]


@_one_error
def tune(
    *,
    model: str,
    data: AnyPath,
    device: Literal["auto", "cuda", "cpu"] = "auto",
    memory_bytes: int | None = None,
    seq_length_tokens: int = SEQ_LENGTH_TOKENS,
    precision: Literal["bf16", "fp32"] | None = None,
    attention_dropout: float | None = None,
    global_batch_tokens: int | None = None,
    ranks: int | None = None,
    explore: bool = False,
    minutes: float = 15.0,
    skip: "frozenset[StageName] | set[StageName]" = frozenset(),
    max_rows: int = MAX_ROWS,
    out: AnyPath = "profiles",
    reports: AnyPath = "reports",
) -> "TuningResult":
    """Make a tuned profile of a model, and a report, by measuring on this machine; progress goes to standard error.

    Called again with the same arguments, it goes on from what was finished.

    Args:
        model: A preset, or a transformers ``config.json``.
        data: A dataset that ``autotune data prepare`` wrote.
        device: What to measure.
        memory_bytes: Budget of one rank; a CPU needs one.
        seq_length_tokens: Tokens in a row.
        precision: Of the matrix products.
        attention_dropout: Instead of the model's.
        global_batch_tokens: Real tokens of an optimizer step over all ranks; None takes 524,288.
        ranks: Local ranks; None takes all visible GPUs.
        explore: Whether the settings of the step are searched together.
        minutes: For everything; the probe takes what it takes.
        skip: Stages to leave out, such as ``{"network", "report"}``.
        max_rows: Try no larger micro-batch.
        out: Directory of the profile.
        reports: Where ledger and report go.

    Returns:
        Files of profile and report, how each stage went, and the seconds that all took.

    Raises:
        AutotuneError: If something cannot be used, nothing fits, or this is a login node.

    >>> from autotune import read_profile, tune
    >>> result = tune(
    ...     model=model, data=data, device="cpu", memory_bytes=2**28, seq_length_tokens=32, max_rows=4, minutes=0.2,
    ...     skip={"network", "baseline", "report"}, out=out / "profiles", reports=out / "reports",
    ... )
    >>> [stage.status for stage in result.stages if stage.name in ("probe", "workers")]
    ['done', 'done']
    >>> read_profile(path=result.profiles[0]).profile.evidence.probe.feasible_max
    4
    """
    from autotune.commands.login_node import refuse_login_node
    from autotune.tuning.probe import ProbeAsked
    from autotune.tuning.tune import TuneAsked, Tuning
    from trainer.presets import model_settings

    asked = TuneAsked(
        probe=ProbeAsked(
            models=(model_settings(model),),
            data=Path(data),
            out=Path(out),
            reports=Path(reports),
            memory_bytes=memory_bytes,
            seq_length_tokens=seq_length_tokens,
            attention_dropout=attention_dropout,
            precision=precision,
            global_batch_tokens=global_batch_tokens,
            ranks=ranks,
            max_rows=max_rows,
            traced="estimate" not in skip,
        ),
        device=device,
        minutes=minutes,
        skip=frozenset(skip) if explore else frozenset(skip) | {"explore"},
    )
    refuse_login_node(["autotune", "tune", "--model", model, "--data", str(data)])
    tuning = Tuning(asked=asked)
    result = tuning.run()
    for error in tuning.failed:
        raise error
    return result


@_one_error
def plan(
    *,
    model: str | None = None,
    profile: AnyPath | None = None,
    tokens: float | None = None,
    epochs: float | None = None,
    flops: float | None = None,
    hours: float | None = None,
    steps: int | None = None,
    gpu: str | None = None,
    nodes: int = 1,
    ranks_per_node: int | None = None,
    price_per_gpu_hour: float | None = None,
    data: AnyPath | None = None,
    global_batch_tokens: float | None = None,
    seq_length_tokens: int = SEQ_LENGTH_TOKENS,
    precision: Literal["bf16", "fp32"] = "bf16",
) -> "Plan":
    """Say what a training takes before it is paid for: time, GPU-hours, cost, energy, storage, memory.

    Args:
        model: A preset or a ``config.json``; or give ``profile``.
        profile: Its settings, and what was measured.
        tokens: Real tokens to train on; or give one of the next four. None of them takes the profile's steps.
        epochs: Passes over the dataset.
        flops: Operations by 6·N·D.
        hours: Time to train for.
        steps: Optimizer steps.
        gpu: The card, such as ``h100-nvl-94gb``; None takes the profile's machine.
        nodes: Of the training.
        ranks_per_node: GPUs of each.
        price_per_gpu_hour: In any currency.
        data: A dataset, for what rows hold and how long a pass is.
        global_batch_tokens: Real tokens of a step over all ranks.
        seq_length_tokens: Tokens in a row, of a model.
        precision: Of the matrix products, of a model.

    Returns:
        Figures, each with what it rests on: given, measured, predicted or assumed.

    Raises:
        AutotuneError: If the card, the model, the dataset or the goal cannot be used.

    >>> from autotune import plan
    >>> found = plan(profile="profiles/bert-mini-cpu.toml", tokens=1e9)
    >>> found.tokens.value, found.tokens.basis, found.wall_s.basis
    (1000000000.0, 'given', 'predicted')
    """
    from autotune.errors import UsageError
    from autotune.search.plan import Asked
    from autotune.search.plan import plan as plan_training
    from autotune.search.prediction import settings_of_step
    from autotune.search.profiles import read_profile as read
    from trainer.presets import model_settings

    if (model is None) == (profile is None):
        raise UsageError("a plan is of a model or of a profile", next_step="Give one of them.")
    source: StoredProfile | TrainConfig
    if profile is not None:
        source = read(Path(profile))
    else:
        named = model_settings(model or "")
        source = settings_of_step(named, "cuda", layout=None, precision=precision, seq_length_tokens=seq_length_tokens)
    amounts: dict[GoalKind, float | None] = {
        "tokens": tokens, "epochs": epochs, "flops": flops, "hours": hours, "steps": steps,
    }  # fmt: skip
    asked = Asked(
        source=source,
        model_argument=model or "",
        goal=_goal(amounts),
        gpu=gpu,
        nodes=nodes,
        ranks_per_node=ranks_per_node,
        price_per_device_hour=price_per_gpu_hour,
        data=None if data is None else Path(data),
        global_batch_tokens=global_batch_tokens,
    )
    return plan_training(asked, _quietly)


@_one_error
def advise(
    *,
    place: AnyPath,
    profile: AnyPath | None = None,
    data: AnyPath | None = None,
    nodes: int | None = None,
    reports: AnyPath = "reports",
) -> "tuple[Advice, ...]":
    """Say what to change in a training, with evidence, expected gain, cost, and the command to run.

    Args:
        place: A profile, a run, or a directory with data.
        profile: That a run was started from.
        data: Its dataset; None looks where the profile says.
        nodes: As many as are meant; None takes what was measured.
        reports: Where ledgers lie.

    Returns:
        Recommendations, the largest expected gain first; empty where there is nothing to say.

    Raises:
        AutotuneError: If the place is nothing of these, or the run was not started from the profile.

    >>> from autotune import advise
    >>> found = advise(place="profiles/bert-mini-cpu.toml")
    >>> all(one.claim and one.would_change for one in found)
    True
    """
    from autotune.decide.advice import advise as find_advice
    from autotune.measure.host import SystemHost
    from autotune.search.situation import situation_of

    now = situation_of(
        Path(place),
        SystemHost(),
        profile=None if profile is None else Path(profile),
        data=None if data is None else Path(data),
        nodes=nodes,
        reports=Path(reports),
    )
    return find_advice(now)


@_one_error
def compare(*, a: AnyPath, b: AnyPath) -> "Comparison":
    """Hold two profiles, tunings or runs against each other: what changed, and which figures differ beyond noise.

    Args:
        a: A profile, a directory under ``reports/``, or one under ``runs/``; ratios are to it.
        b: Another one.

    Returns:
        Settings that differ, and every figure that both have with its change, its 95 % interval and a verdict.

    Raises:
        AutotuneError: If either is nothing of these.

    >>> from autotune import compare
    >>> found = compare(a="profiles/bert-mini-cpu.toml", b="profiles/modernbert-tiny-cpu.toml")
    >>> [change.key for change in found.circumstances]
    ['model']
    >>> {figure.verdict for figure in found.figures}
    {'not comparable'}
    """
    from autotune.search.compare import compare_paths

    return compare_paths(Path(a), Path(b))


def _goal(amounts: "dict[GoalKind, float | None]") -> "Goal | None":
    from autotune.core.plan import Goal
    from autotune.errors import UsageError

    given = {kind: amount for kind, amount in amounts.items() if amount is not None}
    if len(given) > 1 or not all(0 < amount < float("inf") for amount in given.values()):
        told = ", ".join(f"{kind}={amount:g}" for kind, amount in given.items())
        raise UsageError(f"{told} does not say how long to train", next_step="Give one positive number, or none.")
    return next((Goal(kind=kind, amount=amount, source=f"{kind}={amount:g}") for kind, amount in given.items()), None)


def _quietly(done: float, total: float | None, note: str) -> None:
    """Progress that nobody watches."""
