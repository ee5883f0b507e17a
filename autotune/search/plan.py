"""Answer ``autotune plan``: put together what is known of model, data and machines, and have the arithmetic done."""

import shlex
from dataclasses import dataclass
from pathlib import Path

from autotune.core.plan import Figure, Goal, MemoryPlan, Plan
from autotune.core.profile import Profile
from autotune.core.units import format_amount
from autotune.decide.plan import Inputs, plan_of
from autotune.decide.shape import flops_per_token, vocab_size_of, work_of_shape
from autotune.decide.spread import Spread
from autotune.errors import AutotuneError, UsageError
from autotune.search.plan_data import RowFacts, batch_rows, rows_of
from autotune.search.plan_memory import Held, held_by, memory_plan, most_rows_shared
from autotune.search.plan_speed import Work, on_all, rank_rate
from autotune.search.plan_subject import DEFAULT_ROW_TOKENS, Shape, Subject, subject_of
from autotune.search.profiles import StoredProfile
from autotune.search.scaling import Assumed
from trainer.progress import Update

FILLING_TOKENS = 8192
"""Of a micro-batch; assumed: fewer leave the matrix units of a large GPU waiting."""
DEFAULT_VOCAB_SIZE = 30_522
"""BERT's, where neither a dataset nor a profile says better."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What is asked for."""

    source: StoredProfile | Shape
    model_argument: str
    """As the user named the model, for commands."""
    goal: Goal | None
    """None takes the steps that the profile says."""
    gpu: str | None
    nodes: int
    ranks_per_node: int | None
    price_per_device_hour: float | None
    data: Path | None
    vocab_size: int | None
    global_batch_tokens: float | None
    links: Assumed | None
    tokens_per_s: float | None
    """Of one rank, by the user."""
    tensor_ranks: int | None
    pipeline_stages: int | None


def plan(asked: Asked, update: Update) -> Plan:
    """Plan a training.

    Raises:
        AutotuneError: If the card, the model, the dataset or the goal cannot be used, with what to do.
    """
    goal = asked.goal or _goal_of(asked.source)
    subject = subject_of(asked.source, gpu=asked.gpu, nodes=asked.nodes, ranks_per_node=asked.ranks_per_node)
    fleet = subject.fleet
    if fleet.device == "cpu" and asked.price_per_device_hour is not None:
        raise UsageError(
            f"--price-per-gpu-hour: {fleet.name} has no GPU", next_step="Leave it out, or name a card with --gpu."
        )
    rows = rows_of(subject, asked.data)
    wanted = batch_rows(subject, rows, asked.global_batch_tokens)
    dealt = max(wanted, fleet.ranks)
    vocab_size = asked.vocab_size or rows.vocab_size or _vocab_of(subject) or DEFAULT_VOCAB_SIZE
    held = held_by(subject, rows, vocab_size, update, rows_per_rank=-(-dealt // fleet.ranks))
    memory = None
    if isinstance(held, Held):
        memory = memory_plan(held, subject, tensor_ranks=asked.tensor_ranks, pipeline_stages=asked.pipeline_stages)
    work = _work(subject, rows, held, memory, dealt_rows=dealt, vocab_size=vocab_size)
    rate = rank_rate(subject, work, asked.tokens_per_s)
    spread = None
    if isinstance(rate, Figure):
        own_batch = asked.global_batch_tokens is None and dealt == wanted
        spread = on_all(subject, work, rate, asked.links, own_batch=own_batch)
    return plan_of(
        Inputs(
            model=subject.train.model.name,
            goal=goal,
            fleet=fleet,
            parameters=held.parameters if isinstance(held, Held) else None,
            flops_per_token=work.flops_per_token,
            tokens_per_row=rows.tokens_per_row,
            tokens_per_pass=rows.tokens_per_pass,
            batch_rows=dealt,
            rate=rate if isinstance(rate, Figure) else None,
            rate_missing=rate if isinstance(rate, str) else "",
            spread=spread,
            checkpoint=subject.train.checkpoint,
            power_w=_power(subject),
            price_per_device_hour=asked.price_per_device_hour,
            memory=memory,
            memory_missing=None if isinstance(held, Held) else held.message,
            warnings=(
                *subject.said, *rows.said, *_dealing(wanted, dealt, rows), *_no_rate(rate), *_small(work, rate, spread)
            ),
            next_command=_next(asked, subject, memory),
        )
    )  # fmt: skip


def _work(
    subject: Subject,
    rows: RowFacts,
    held: Held | AutotuneError,
    memory: MemoryPlan | None,
    *,
    dealt_rows: int,
    vocab_size: int,
) -> Work:
    """What a rank is given to do."""
    parameters = held.parameters if isinstance(held, Held) else None
    strategy = _strategy(memory, subject)
    return Work(
        flops_per_token=None if parameters is None else _flops(subject, rows, vocab_size, parameters),
        tokens_per_row=rows.tokens_per_row.value,
        batch_rows=dealt_rows,
        most_rows=_most_rows(held, subject, strategy),
        parameters=None if parameters is None else round(parameters.value),
        strategy=strategy,
    )


def _goal_of(source: StoredProfile | Shape) -> Goal:
    if isinstance(source, StoredProfile):
        steps = source.profile.train.max_steps
        return Goal(kind="steps", amount=steps, source=f"the profile's max_steps, {steps:,}")
    raise UsageError(
        "nothing says how long to train",
        next_step="Give one of --tokens 45.2B, --epochs 3 --data DIR, --flops 1e20, --hours 24, --steps 100000.",
    )


def _vocab_of(subject: Subject) -> int | None:
    """As the profile's estimate says, or what its number of parameters leaves for the table of embeddings."""
    profile = subject.profile
    if profile is None:
        return None
    if profile.evidence.estimate is not None:
        return profile.evidence.estimate.vocab_size
    probe = profile.evidence.probe
    return None if probe is None or probe.parameters is None else vocab_size_of(subject.train, probe.parameters)


def _flops(subject: Subject, rows: RowFacts, vocab_size: int, parameters: Figure) -> Figure:
    work = work_of_shape(subject.train, vocab_size, round(parameters.value))
    if work is None:
        return Figure(value=6 * parameters.value, basis=parameters.basis, source="6·N: the architecture is not known")
    return Figure(
        value=flops_per_token(work, rows.lengths, subject.train.masking_probability),
        basis="predicted" if rows.tokens_per_pass is not None else "assumed",
        source="the model's shape" + ("" if rows.tokens_per_pass is not None else "; documents of half a row assumed"),
    )


def _strategy(memory: MemoryPlan | None, subject: Subject) -> str:
    """As the profile says; where the model does not fit so, the first of the trainer's ways in which it does."""
    said = subject.train.parallel.strategy
    if memory is None or memory.most_rows > 0 or said != "ddp":
        return said
    names = {"ZeRO-1": "zero1", "ZeRO-3 (FSDP2)": "fsdp2"}
    return next((names[row.name] for row in memory.rows if row.fits and row.name in names), "fsdp2")


def _most_rows(held: Held | AutotuneError, subject: Subject, strategy: str) -> int:
    if not isinstance(held, Held):
        return subject.train.micro_batch_rows
    if held.most_rows > 0 and strategy != "fsdp2":
        return held.most_rows
    return max(held.most_rows, most_rows_shared(held, subject)) if strategy == "fsdp2" else 1


def _power(subject: Subject) -> Figure | None:
    if subject.fleet.device == "cpu":
        return None
    measured = _measured_power(subject.measured)
    if measured is not None:
        return Figure(value=measured, basis="measured", source="mean of the worker sweep's windows, by NVML")
    cap = None if subject.measured is None else subject.measured.fingerprint.gpu_power_cap_w
    if cap is not None:
        return Figure(value=cap, basis="assumed", source=f"all GPUs at their power cap of {cap:g} W")
    card = subject.card
    if card is None:
        return None
    told = f"all GPUs at the card's limit, {card.power_limit_w} W: {card.power_source.text}"
    return Figure(value=card.power_limit_w, basis="assumed", source=told)


def _measured_power(profile: Profile | None) -> float | None:
    workers = None if profile is None else profile.evidence.workers
    if workers is None:
        return None
    return next(
        (row.gpu.power_w for row in workers.rows if row.loader_workers == workers.chosen and row.gpu is not None), None
    )


def _dealing(wanted: int, dealt: int, rows: RowFacts) -> tuple[str, ...]:
    if wanted == dealt:
        return ()
    tokens = format_amount(dealt * rows.tokens_per_row.value)
    return (
        f"A global batch of {wanted:,} rows cannot be dealt to {dealt:,} ranks. The figures are for {dealt:,} rows, "
        f"{tokens} real tokens: the least there can be. Choose: --global-batch-tokens.",
    )


def _no_rate(rate: Figure | str) -> tuple[str, ...]:
    return () if isinstance(rate, Figure) else (f"No time and no cost: {rate}. Say it: --tokens-per-s, of one rank.",)


def _small(work: Work, rate: Figure | str, spread: Spread | None) -> tuple[str, ...]:
    """What an assumed MFU says nothing of."""
    if isinstance(rate, str) or rate.basis != "assumed" or spread is None:
        return ()
    if spread.rows * work.tokens_per_row >= FILLING_TOKENS or spread.rows >= work.most_rows:
        return ()
    rows = "1 row" if spread.rows == 1 else f"{spread.rows} rows"
    return (f"Micro-batches are of {rows} where {work.most_rows:,} fit: the assumed MFU is of full ones.",)


def _next(asked: Asked, subject: Subject, memory: MemoryPlan | None) -> str:
    stored, fleet = subject.stored, subject.fleet
    if stored is None or not subject.own or stored.profile.evidence.probe is None:
        return _measure(asked, subject, memory)
    path = shlex.quote(str(stored.path))
    network = stored.profile.evidence.network
    if fleet.nodes > 1:
        if network is None or not any(link.scope == "between nodes" for link in network.links):
            return f"autotune network --profile {path} --slurm"
        return f"autotune launch slurm --profile {path} --nodes {fleet.nodes}"
    if stored.profile.evidence.workers is None:
        return f"autotune workers --profile {path}"
    return f"autotune launch local --profile {path}"


def _measure(asked: Asked, subject: Subject, memory: MemoryPlan | None) -> str:
    """The command that finds out what is assumed: a probe on that card, or what else would fit where nothing does."""
    train, card = subject.train, subject.card
    words = ["--model", asked.model_argument or train.model.name]
    if memory is not None and not memory.most_rows and card is not None:
        words = ["autotune", "estimate", *words, "--gpu", card.key, "--ranks", str(subject.fleet.ranks), "--what-if"]
    else:
        words = ["autotune", "probe", *words, "--data", "DIR" if asked.data is None else str(asked.data)]
    if train.seq_length_tokens != DEFAULT_ROW_TOKENS:
        words += ["--seq-length", str(train.seq_length_tokens)]
    return shlex.join(words)
