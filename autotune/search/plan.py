"""Answer ``autotune plan``: put together what is known of model, data and machines, and have the arithmetic done."""

from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
import numpy.typing as npt

from autotune.cluster.training import default_ranks
from autotune.core.cards import CARDS, Card, card_of, find_card
from autotune.core.dataset import SPECIAL_TOKENS_PER_SAMPLE, LengthDistribution, RowContents
from autotune.core.defaults import VOCAB_SIZE
from autotune.core.plan import Fleet, Goal, PlanFigure
from autotune.core.profile import Profile
from autotune.core.units import format_amount
from autotune.decide.choose import DEFAULT_GLOBAL_BATCH_TOKENS
from autotune.decide.memory import Expected, expected_on_cpu, expected_on_gpu
from autotune.decide.plan import MemoryPlan, Plan, PlanInputs, plan_of
from autotune.decide.probe_command import command
from autotune.decide.scaling import AllRanks
from autotune.decide.shape import assumed_lengths, flops_per_token, typical_lengths, vocab_size_of, work_of_shape
from autotune.errors import UsageError
from autotune.search.plan_memory import memory_of_probe, most_rows_shared, shared, traced
from autotune.search.plan_speed import Work, on_all, rank_rate
from autotune.search.profiles import StoredProfile
from autotune.search.row_contents import assumed_contents, contents_of
from autotune.search.scaling import Assumed, joins_nodes
from trainer.config import TrainConfig
from trainer.dataset import Manifest, read_manifest
from trainer.progress import Update

FILLING_TOKENS = 8192
"""Of a micro-batch; assumed: fewer leave the Tensor Cores of a large GPU waiting."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """What is asked for."""

    source: StoredProfile | TrainConfig
    """A profile, or settings of a model without one."""
    model_argument: str
    """As the user named the model, for commands."""
    goal: Goal | None
    """None takes the steps that the profile says."""
    gpu: str | None = None
    nodes: int = 1
    ranks_per_node: int | None = None
    price_per_device_hour: float | None = None
    data: Path | None = None
    vocab_size: int | None = None
    global_batch_tokens: float | None = None
    links: Assumed | None = None
    tokens_per_s: float | None = None
    """Of one rank, by the user."""
    tensor_ranks: int | None = None
    pipeline_stages: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Subject:
    """The model, its settings and the machines."""

    train: TrainConfig
    """As it would run there."""
    stored: StoredProfile | None = None
    measured: Profile | None = None
    """The profile, if its evidence is of these machines."""
    card: Card | None
    """None of a CPU, and of a GPU that is not in the table."""
    fleet: Fleet
    said: tuple[str, ...] = ()
    """What differs from the profile."""

    @property
    def profile(self) -> Profile | None:
        return None if self.stored is None else self.stored.profile


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rows:
    """What sequences hold."""

    contents: RowContents
    tokens: PlanFigure
    """Real ones of a row, on average."""
    tokens_per_pass: PlanFigure | None = None
    """None without a dataset."""
    lengths: npt.NDArray[np.int64]
    """Typical ones of documents, special tokens included; shape (N,)."""
    vocab_assumed: bool
    said: tuple[str, ...] = ()


def plan(asked: PlanRequest, update: Update) -> Plan:
    """Plan a training.

    Raises:
        AutotuneError: If the card, the model, the dataset or the goal cannot be used, with what to do.
    """
    goal = asked.goal or _goal_of(asked.source)
    subject = _subject(asked)
    train, fleet = subject.train, subject.fleet
    if fleet.device == "cpu" and asked.price_per_device_hour is not None:
        raise UsageError(
            f"--price-per-gpu-hour: {fleet.name} has no GPU", next_step="Leave it out, or name a card with --gpu."
        )
    rows = _rows(subject, asked)
    wanted = _batch_rows(subject, rows, asked.global_batch_tokens)
    dealt = max(wanted, fleet.ranks)
    found = (None if subject.measured is None else memory_of_probe(subject.measured)) or traced(
        train,
        fleet,
        _expected(subject),
        rows.contents,
        update,
        vocab_assumed=rows.vocab_assumed,
        rows_per_rank=-(-dealt // fleet.ranks),
    )
    memory, parameters, most_rows = None, None, train.micro_batch_rows
    if isinstance(found, MemoryPlan):
        memory = shared(found, fleet, tensor_ranks=asked.tensor_ranks, pipeline_stages=asked.pipeline_stages)
        parameters, most_rows = memory.parameters, max(1, memory.most_rows)
    strategy = _strategy(memory, train)
    if memory is not None and strategy == "fsdp2":
        most_rows = max(memory.most_rows, most_rows_shared(memory, fleet))
    work = Work(
        train=train,
        fleet=fleet,
        profile=subject.measured,
        flops_per_token=None if parameters is None else _flops(train, rows, parameters),
        tokens_per_row=rows.tokens.value,
        batch_rows=dealt,
        most_rows=most_rows,
        parameters=None if parameters is None else round(parameters.value),
        strategy=strategy,
    )
    rate = rank_rate(work)
    if asked.tokens_per_s is not None:
        rate = PlanFigure(value=asked.tokens_per_s, basis="given", source="--tokens-per-s")
    every = AllRanks()
    if isinstance(rate, PlanFigure):
        own_batch = asked.global_batch_tokens is None and dealt == wanted
        every = on_all(work, rate=rate, assumed=asked.links, own_batch=own_batch)
    return plan_of(
        PlanInputs(
            **{one.name: getattr(every, one.name) for one in fields(every)},
            model=train.model.name,
            goal=goal,
            fleet=fleet,
            parameters=parameters,
            flops_per_token=work.flops_per_token,
            tokens_per_row=rows.tokens,
            tokens_per_pass=rows.tokens_per_pass,
            batch_rows=dealt,
            rank_tokens_per_s=rate if isinstance(rate, PlanFigure) else None,
            rate_missing=rate if isinstance(rate, str) else "",
            checkpoint=train.checkpoint,
            power_w=_power(subject),
            price_per_device_hour=asked.price_per_device_hour,
            memory=memory,
            memory_missing=None if isinstance(found, MemoryPlan) else found.message,
            warnings=(*subject.said, *rows.said, *_said(work, wanted, rate, every)),
            next_command=_next(asked, subject, memory),
        )
    )


def _goal_of(source: StoredProfile | TrainConfig) -> Goal:
    if isinstance(source, StoredProfile):
        steps = source.profile.train.max_steps
        return Goal(kind="steps", amount=steps, source=f"the profile's max_steps, {steps:,}")
    raise UsageError(
        "nothing says how long to train",
        next_step="Give one of --tokens 45.2B, --epochs 3 --data DIR, --flops 1e20, --hours 24, --steps 100000.",
    )


def _subject(asked: PlanRequest) -> _Subject:
    card, source = None if asked.gpu is None else find_card(asked.gpu), asked.source
    if isinstance(source, TrainConfig):
        if card is None:
            raise UsageError(
                "a model without a profile needs a card to be planned for",
                next_step=f"Use --gpu with one of {', '.join(one.key for one in CARDS)}; or --profile PROFILE.toml.",
            )
        return _Subject(train=source, card=card, fleet=_on_card(card, asked))
    profile = source.profile
    train, there, own_card = profile.train, profile.fingerprint, None
    if there.gpu_name is not None and there.gpu_total_bytes is not None and not there.gpu_mig:
        own_card = card_of(there.gpu_name, there.gpu_total_bytes)
    if card is not None and card is not own_card:
        measured_on = there.gpu_name or there.cpu_model or f"a {there.device}"
        said = f"The profile is of {measured_on}: its rates, memory and batch say nothing of {card.name}."
        if train.device == "cpu":
            train = train.model_copy(update={"device": "cuda", "precision": "bf16"})
            said += " It is planned with bf16 there."
        return _Subject(train=train, stored=source, card=card, fleet=_on_card(card, asked), said=(said,))
    on_cpu = there.device == "cpu"
    fleet = Fleet(
        device=there.device,
        name=there.gpu_name or (there.cpu_model or "a CPU" if on_cpu else "a GPU"),
        nodes=asked.nodes,
        ranks_per_node=asked.ranks_per_node or default_ranks(profile),
        cpus_per_rank=there.allotted_cpus / default_ranks(profile) if on_cpu else None,
        memory_bytes=profile.constraints.memory_budget_bytes,
    )
    return _Subject(train=train, stored=source, measured=profile, card=own_card, fleet=fleet)


def _on_card(card: Card, asked: PlanRequest) -> Fleet:
    ranks, size = asked.ranks_per_node or 1, card.default_budget_bytes
    return Fleet(device="cuda", name=card.name, nodes=asked.nodes, ranks_per_node=ranks, memory_bytes=size)


def _rows(subject: _Subject, asked: PlanRequest) -> _Rows:
    """Look at the dataset that is named, else at the one the profile names if it is here; else assume.

    Raises:
        BadConfig: If what is named is no dataset.
    """
    train, profile = subject.train, subject.profile
    row_tokens, probe = train.seq_length_tokens, None if profile is None else profile.evidence.probe
    directory = asked.data or (None if subject.stored is None else subject.stored.data_here())
    if directory is not None:
        contents, manifest = contents_of(directory, train.layout, row_tokens), read_manifest(directory)
        histogram = manifest.train.length_histogram
        samples = LengthDistribution(edges=histogram.edges, counts=histogram.counts)
        other = profile is not None and manifest.dataset_hash != profile.fingerprint.dataset_hash
        told = "rows of the dataset, a part of it laid out"
        return _Rows(
            contents=contents,
            tokens=PlanFigure(value=contents.mean_real_tokens, basis="measured", source=told),
            tokens_per_pass=_pass(manifest, samples, contents, row_tokens),
            lengths=typical_lengths(samples, row_tokens),
            vocab_assumed=False,
            said=("The dataset is not the one that the profile was tuned on.",) if other else (),
        )
    of_probe = None if probe is None or probe.parameters is None else vocab_size_of(train, probe.parameters)
    contents = assumed_contents(asked.vocab_size or of_probe or VOCAB_SIZE, train.layout, row_tokens)
    if probe is not None:
        told = "rows of the dataset that was probed with"
        tokens = PlanFigure(value=probe.mean_real_tokens_per_row, basis="measured", source=told)
    else:
        packed = train.layout == "packed"
        told = "packed rows of functions are 99.7 % full" if packed else "rows without padding, for want of a dataset"
        tokens = PlanFigure(value=contents.mean_real_tokens, basis="assumed", source=told)
    return _Rows(contents=contents, tokens=tokens, lengths=assumed_lengths(row_tokens), vocab_assumed=True)


def _pass(
    manifest: Manifest, samples: LengthDistribution, contents: RowContents, row_tokens: int
) -> PlanFigure | None:  # fmt: skip
    count, room = manifest.train.samples, row_tokens - SPECIAL_TOKENS_PER_SAMPLE
    if not count:
        return None
    if samples.counts[-1] and samples.edges[-1] < room:  # the last bin is open: how many are longer, it does not say
        of_a_sample = contents.mean_real_tokens / contents.mean_samples
        return PlanFigure(value=count * of_a_sample, basis="measured", source="samples by what those laid out hold")
    cut = samples.truncated_share(room) or 0.0
    stored = manifest.train.tokens if not cut else count * (samples.mean_tokens(room) or 0.0)
    told = "the manifest" if not cut else f"the manifest's lengths; {cut:.0%} of the samples are cut to a row"
    return PlanFigure(value=stored + SPECIAL_TOKENS_PER_SAMPLE * count, basis="measured", source=told)


def _batch_rows(subject: _Subject, rows: _Rows, tokens: float | None) -> int:
    """Return rows of a step over all ranks: as asked for, else as the profile says, else as ``probe`` would choose."""
    train, profile = subject.train, subject.profile
    if tokens is None and profile is None:
        tokens = DEFAULT_GLOBAL_BATCH_TOKENS
    elif tokens is None and profile is not None:
        if train.global_batch_tokens is None and train.global_batch_samples is None:
            return train.global_batch_rows
        tokens = train.global_batch_tokens or profile.constraints.global_batch_tokens
    return max(1, round((tokens or 0.0) / rows.tokens.value))


def _flops(train: TrainConfig, rows: _Rows, parameters: PlanFigure) -> PlanFigure:
    work = work_of_shape(train, rows.contents.vocab_size, round(parameters.value))
    if work is None:
        told = "6·N: the architecture is not known"
        return PlanFigure(value=6 * parameters.value, basis=parameters.basis, source=told)
    known = rows.tokens_per_pass is not None
    return PlanFigure(
        value=flops_per_token(work, rows.lengths, train.masking_probability),
        basis="predicted" if known else "assumed",
        source="the model's shape" + ("" if known else "; documents of half a row assumed"),
    )


def _expected(subject: _Subject) -> Expected:
    if subject.fleet.device == "cpu":
        return expected_on_cpu()
    if subject.card is None:
        return expected_on_gpu(None, subject.fleet.ranks_per_node)
    return expected_on_gpu(subject.card.compute_capability, subject.fleet.ranks_per_node, subject.card.usable_bytes)


def _strategy(memory: MemoryPlan | None, train: TrainConfig) -> str:
    """Return the profile's; if the model does not fit so, the first of the trainer's ways in which it does."""
    said = train.parallel.strategy
    if memory is None or memory.most_rows > 0 or said != "ddp":
        return said
    names = {"ZeRO-1": "zero1", "ZeRO-3 (FSDP2)": "fsdp2"}
    return next((names[one.name] for one in memory.shares if one.fits and one.name in names), "fsdp2")


def _power(subject: _Subject) -> PlanFigure | None:
    if subject.fleet.device == "cpu":
        return None
    profile, card = subject.measured, subject.card
    workers = None if profile is None else profile.evidence.workers
    for row in [] if workers is None else workers.rows:
        if workers is not None and row.loader_workers == workers.chosen and row.gpu is not None and row.gpu.power_w:
            told = "mean of the worker sweep's windows, by NVML"
            return PlanFigure(value=row.gpu.power_w, basis="measured", source=told)
    cap = None if profile is None else profile.fingerprint.gpu_power_cap_w
    if cap is not None:
        return PlanFigure(value=cap, basis="assumed", source=f"all GPUs at their power cap of {cap:g} W")
    if card is None:
        return None
    told = f"all GPUs at the card's limit, {card.power_limit_w} W: {card.power_source}"
    return PlanFigure(value=card.power_limit_w, basis="assumed", source=told)


def _said(work: Work, wanted: int, rate: PlanFigure | str, every: AllRanks) -> Iterator[str]:
    dealt, per_row = work.batch_rows, work.tokens_per_row
    if wanted != dealt:
        yield (
            f"A global batch of {wanted:,} rows cannot be dealt to {dealt:,} ranks. The figures are for {dealt:,} "
            f"rows, {format_amount(dealt * per_row)} real tokens: the least there can be. Choose: "
            "--global-batch-tokens."
        )
    if isinstance(rate, str):
        yield f"No time and no cost: {rate}. Say it: --tokens-per-s, of one rank."
    elif rate.basis == "assumed" and 0 < every.rows < min(work.most_rows, FILLING_TOKENS / per_row):
        rows = "1 row" if every.rows == 1 else f"{every.rows} rows"
        yield f"Micro-batches are of {rows} where {work.most_rows:,} fit: the assumed MFU is of full ones."


def _next(asked: PlanRequest, subject: _Subject, memory: MemoryPlan | None) -> str:
    """Return the command that measures what is assumed, or that starts what is planned."""
    stored, fleet, train, card = subject.stored, subject.fleet, subject.train, subject.card
    if stored is None or subject.measured is None or stored.profile.evidence.probe is None:
        model = asked.model_argument or train.model.name
        if memory is not None and not memory.most_rows and card is not None:
            return command(
                "estimate", model=model, gpu=card.key, ranks=fleet.ranks, what_if=True,
                seq_length=train.seq_length_tokens,
            )  # fmt: skip
        return command("probe", model=model, data=asked.data or "DIR", seq_length=train.seq_length_tokens)
    evidence, path = stored.profile.evidence, stored.path
    if fleet.nodes > 1:
        if not joins_nodes(evidence.network):
            return command("network", profile=path, slurm=True)
        return command("launch slurm", profile=path, nodes=fleet.nodes)
    return command("workers" if evidence.workers is None else "launch local", profile=path)
