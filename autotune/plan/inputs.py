"""Inputs of ``autotune plan``: facts about the model, data and machines."""

from dataclasses import dataclass, replace

from autotune.base.defaults import VOCAB_SIZE
from autotune.base.units import format_amount, format_percent
from autotune.base.wording import plural
from autotune.corpus.values import (
    SPECIAL_TOKENS_PER_SAMPLE,
    LengthDistribution,
    SequenceContents,
)
from autotune.errors import UsageError
from autotune.evidence.network import Network, RankCompute
from autotune.evidence.plan import Basis, Fleet, Goal, PlanFigure
from autotune.evidence.profile import Evidence, Profile
from autotune.launch.training_job import default_ranks
from autotune.machine.gpu_models import (
    GPU_MODELS,
    GpuModel,
    find_gpu_model,
    gpu_model_of,
)
from autotune.memory.estimate import CannotTrace
from autotune.network.decide.scaling_model import (
    AllRanks,
    Load,
    ScalingModel,
    gradient_syncs,
    spread,
)
from autotune.network.gradient_parts import gradient_parts
from autotune.network.scaling import ASSUMED_LINE_SHARE, Assumed, joins_nodes, known_of
from autotune.plan.code_inputs import plan_of_code
from autotune.plan.decide import Plan, plan_of
from autotune.plan.request import LINE_BITS_PER_S, PlanRequest
from autotune.profiles.decide.batch_split import DEFAULT_GLOBAL_BATCH_TOKENS
from autotune.profiles.decide.follow_up import command
from autotune.profiles.decide.rates import expected_rate, tuned_rate
from autotune.profiles.store import StoredProfile
from autotune.speed.decide import predict_speed
from autotune.speed.measure import known_rates
from autotune.subjects.mlm.memory.contents import assumed_contents, contents_of
from autotune.subjects.mlm.memory.plan_memory import memory_of_probe, trace_memory
from autotune.subjects.mlm.memory.plan_shares import (
    max_micro_batch_size_shared,
    strategy_that_fits,
    with_shares,
)
from autotune.subjects.mlm.memory.values import MemoryPlan
from autotune.subjects.mlm.model_work import estimate_vocab_size
from trainer.formats.manifest import read_manifest
from trainer.formats.progress import Update
from trainer.formats.train_config import Strategy, TrainConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class _Subject:
    """The model, its settings and the machines."""

    train: TrainConfig
    """Settings as they would run on these machines."""
    stored: StoredProfile | None = None
    measured: Profile | None = None
    """The profile, if its evidence was measured on these machines."""
    gpu_model: GpuModel | None
    """Model of the GPU; None for a CPU, and for a GPU that is not in the table."""
    fleet: Fleet
    said: str = ""
    """Warning that the profile is of other machines."""


def plan(asked: PlanRequest, update: Update) -> Plan:
    """Plan a training.

    Raises:
        AutotuneError: If the GPU, the model, the dataset or the goal cannot be used.
    """
    source = asked.source
    if isinstance(source, StoredProfile) and not source.profile.has_train:
        return plan_of_code(asked, source)
    if (goal := asked.goal) is None:
        if not isinstance(asked.source, StoredProfile):
            add = (
                "Add one of --tokens 45.2B, --epochs 3 --data DIR, --flops 1e20,"
                " --duration 24h, --steps 100000."
            )
            raise UsageError("the length of the training is missing", next_step=add)
        steps = asked.source.profile.train.max_steps
        goal = Goal(
            kind="steps", amount=steps, source=f"the profile's max_steps, {steps:,}"
        )
    subject = _subject(asked)
    train, fleet, measured = subject.train, subject.fleet, subject.measured
    if fleet.device == "cpu" and asked.price_per_device_hour is not None:
        what = f"--price-per-gpu-hour cannot be used: {fleet.name} has no GPU"
        raise UsageError(what, next_step="Remove it, or add --gpu.")
    contents, per_sequence, per_pass, other_data = _rows(subject, asked)
    wanted = _global_batch_size(subject, per_sequence.value, asked.global_batch_tokens)
    known = Plan(
        model=train.model.name,
        goal=goal,
        fleet=fleet,
        units_per_size=per_sequence,
        units_per_pass=per_pass,
        global_batch_size=max(wanted, fleet.ranks),
        price_per_device_hour=asked.price_per_device_hour,
    )
    verified = None if measured is None else memory_of_probe(measured)
    found: MemoryPlan | CannotTrace
    if verified is None or (
        asked.units_per_s is None
        and measured is not None
        and tuned_rate(measured) is None
    ):
        sequences_per_rank = -(-known.global_batch_size // fleet.ranks)
        found = trace_memory(
            train,
            fleet,
            subject.gpu_model,
            contents,
            update,
            sequences_per_rank=sequences_per_rank,
        )
        if verified is not None:
            found = replace(
                verified, work=found.work if isinstance(found, MemoryPlan) else None
            )
    else:
        found = verified
    if isinstance(found, MemoryPlan):
        memory = with_shares(
            found,
            fleet,
            asked.tensor_ranks,
            asked.pipeline_stages,
            is_verified=verified is not None,
        )
        known = replace(known, memory=memory)
    else:
        known = replace(known, memory_missing=found.message)
    own_batch = asked.global_batch_tokens is None and known.global_batch_size == wanted
    known = _with_rate(known, subject, asked, own_batch=own_batch)
    if known.global_batch_size != wanted:
        least = format_amount(known.global_batch_size * per_sequence.value)
        cannot = (
            f"A global batch of {wanted:,} sequences is too small for {fleet.ranks:,}"
            f" ranks. The figures are for {fleet.ranks:,} sequences ({least}"
            " non-padding tokens). To change the batch, use --global-batch-tokens."
        )
        known = replace(known, warnings=(cannot, *known.warnings))
    differs = (one for one in (subject.said, other_data) if one)
    following = _next(asked, subject, known.memory)
    return plan_of(
        replace(known, warnings=(*differs, *known.warnings), next_command=following)
    )


def _with_rate(
    known: Plan, subject: _Subject, asked: PlanRequest, *, own_batch: bool
) -> Plan:
    """Return the plan with the rates of one rank and of all ranks.

    If they are unknown, it has the reason.
    """
    rate, memory = _rank_rate(subject, known), known.memory
    if asked.units_per_s is not None:
        rate = PlanFigure(
            value=asked.units_per_s, basis="given", source="--units-per-s"
        )
    if isinstance(rate, str):
        told = (
            f"No time and no cost: {rate}. Give the throughput of one rank with"
            " --units-per-s."
        )
        return replace(known, rate_missing=rate, warnings=(told,))
    largest, strategy = subject.train.micro_batch_size, subject.train.parallel.strategy
    if memory is not None:
        largest, strategy = (
            max(1, memory.max_micro_batch_size),
            strategy_that_fits(memory, strategy),
        )
        if strategy == "fsdp2":
            largest = max(largest, max_micro_batch_size_shared(memory, known.fleet))
    every = _as_measured(subject) if own_batch and asked.links is None else None
    every = every or _on_all(
        known,
        subject,
        asked.links,
        rate,
        strategy=strategy,
        max_micro_batch_size=largest,
    )
    return replace(known, rank_units_per_s=rate, all_ranks=every)


def _subject(asked: PlanRequest) -> _Subject:
    gpu_model, source = (
        None if asked.gpu is None else find_gpu_model(asked.gpu),
        asked.source,
    )
    if isinstance(source, TrainConfig):
        if gpu_model is None:
            keys, instead = (
                ", ".join(one.key for one in GPU_MODELS),
                "plan from a profile: autotune plan PROFILE",
            )
            raise UsageError(
                "--model requires --gpu",
                next_step=f"Add --gpu with one of {keys}; or {instead}",
            )
        return _Subject(
            train=source, gpu_model=gpu_model, fleet=_fleet_of(gpu_model, asked)
        )
    profile = source.profile
    train, there, own_gpu = profile.train, profile.fingerprint, None
    if (
        there.gpu_name is not None
        and there.gpu_total_bytes is not None
        and not there.gpu_mig
    ):
        own_gpu = gpu_model_of(there.gpu_name, there.gpu_total_bytes)
    if gpu_model is not None and gpu_model is not own_gpu:
        measured_on = there.gpu_name or there.cpu_model or f"a {there.device}"
        said = (
            f"The profile was measured on {measured_on}: its rates and memory are not"
            f" used for {gpu_model.name}."
        )
        if train.device == "cpu":
            train = train.model_copy(update={"device": "cuda", "precision": "bf16"})
            said += " The plan assumes bf16."
        return _Subject(
            train=train,
            stored=source,
            gpu_model=gpu_model,
            fleet=_fleet_of(gpu_model, asked),
            said=said,
        )
    on_cpu = there.device == "cpu"
    fleet = Fleet(
        device=there.device,
        name=there.gpu_name or (there.cpu_model or "a CPU" if on_cpu else "a GPU"),
        nodes=asked.nodes,
        ranks_per_node=asked.ranks_per_node or default_ranks(profile),
        cpus_per_rank=there.allotted_cpus / default_ranks(profile) if on_cpu else None,
        memory_bytes=profile.memory_budget_bytes,
    )
    return _Subject(
        train=train, stored=source, measured=profile, gpu_model=own_gpu, fleet=fleet
    )


def _fleet_of(gpu_model: GpuModel, asked: PlanRequest) -> Fleet:
    ranks, size = asked.ranks_per_node or 1, gpu_model.budget_bytes()
    return Fleet(
        device="cuda",
        name=gpu_model.name,
        nodes=asked.nodes,
        ranks_per_node=ranks,
        memory_bytes=size,
    )


def _rows(
    subject: _Subject, asked: PlanRequest
) -> tuple[SequenceContents, PlanFigure, PlanFigure | None, str]:
    """Return the contents of sequences, of a dataset or assumed.

    Returns:
        The contents, the non-padding tokens of a sequence, the tokens of a pass over
        the dataset if known, and a warning if it is another dataset than the profile's.
    """
    train, seq_length_tokens = subject.train, subject.train.seq_length_tokens
    profile = None if subject.stored is None else subject.stored.profile
    directory = asked.data or (
        None if subject.stored is None else subject.stored.existing_data_dir()
    )
    if directory is not None:
        contents, manifest = (
            contents_of(directory, train.layout, seq_length_tokens),
            read_manifest(directory),
        )
        samples, count = (
            LengthDistribution(**manifest.train.length_histogram.model_dump()),
            manifest.train.samples,
        )
        in_all = count * contents.mean_non_padding_tokens / contents.mean_samples
        told = "samples / samples per sequence"
        room = seq_length_tokens - SPECIAL_TOKENS_PER_SAMPLE
        # True if the number of samples longer than a sequence is unknown.
        is_open = samples.counts[-1] and samples.edges[-1] < room
        if not is_open and not samples.truncated_share(room):
            in_all, told = (
                manifest.train.tokens + SPECIAL_TOKENS_PER_SAMPLE * count,
                "the manifest",
            )
        other = (
            profile is not None
            and manifest.dataset_hash != profile.fingerprint.dataset_hash
        )
        per_pass = (
            PlanFigure(value=in_all, basis="measured", source=told) if count else None
        )
        told = "sequences of the dataset, from a part of it"
        tokens = PlanFigure(
            value=contents.mean_non_padding_tokens, basis="measured", source=told
        )
        return (
            contents,
            tokens,
            per_pass,
            "The dataset does not match the one of the profile." if other else "",
        )
    probe = None if profile is None else profile.evidence.probe
    of_probe = (
        None
        if probe is None or probe.parameters is None
        else estimate_vocab_size(train, probe.parameters)
    )
    contents = assumed_contents(
        asked.vocab_size or of_probe or VOCAB_SIZE, train.layout, seq_length_tokens
    )
    if probe is not None:
        told = "sequences of the probed dataset"
        return (
            contents,
            PlanFigure(value=probe.tokens_per_sequence, basis="measured", source=told),
            None,
            "",
        )
    told = (
        "packed sequences of functions are 99.7 % full"
        if train.layout == "packed"
        else "sequences without padding"
    )
    return (
        contents,
        PlanFigure(
            value=contents.mean_non_padding_tokens, basis="assumed", source=told
        ),
        None,
        "",
    )


def _global_batch_size(
    subject: _Subject, tokens_per_sequence: float, tokens: float | None
) -> int:
    """Return the global batch in sequences.

    It is as requested, else as in the profile, else the default of ``probe``.
    """
    train, stored = subject.train, subject.stored
    if tokens is None and stored is not None:
        if train.global_batch_tokens is None and train.global_batch_samples is None:
            return train.global_batch_size
        tokens = (
            train.global_batch_tokens or stored.profile.constraints.global_batch_tokens
        )
    return max(1, round((tokens or DEFAULT_GLOBAL_BATCH_TOKENS) / tokens_per_sequence))


def _rank_rate(subject: _Subject, known: Plan) -> PlanFigure | str:
    """Return the non-padding tokens/s of one rank on one node.

    If they are unknown, it returns the reason.
    """
    train, fleet, memory = subject.train, subject.fleet, known.memory
    measured = None if subject.measured is None else tuned_rate(subject.measured)
    if measured is not None:
        ranks = measured.ranks
        source = f"{measured.source}, {plural(ranks, 'rank')}"
        return PlanFigure.on("measured", measured.interval.scaled(1 / ranks), source)
    rates = known_rates(fleet.name)
    if rates is None:
        return (
            f"the constants of {fleet.name} are unknown: measure them there with"
            " autotune doctor --measure"
        )
    if memory is None or memory.work is None:
        return f"the step of {train.model.name} was not traced"
    speed = predict_speed(memory.work, rates, train, known.units_per_size.value)
    assert speed.non_padding_tokens_per_s is not None
    mfu = "" if speed.mfu is None else f", {format_percent(speed.mfu.value)} MFU"
    told = (
        "a roofline over the traced step at micro-batch size"
        f" {speed.micro_batch_size}{mfu}; {rates.source}"
    )
    return PlanFigure.on("predicted", speed.non_padding_tokens_per_s, told)


def _as_measured(subject: _Subject) -> AllRanks | None:
    """Return the measured step of the same batch on the same number of nodes.

    Returns:
        The throughput, or None if it did not run.
    """
    profile, fleet = subject.measured, subject.fleet
    network = None if profile is None else profile.evidence.network
    if (
        profile is None
        or network is None
        or network.ranks_per_node != fleet.ranks_per_node
    ):
        return None
    row = next(
        (row for row in network.scaling if row.nodes == fleet.nodes and row.measured),
        None,
    )
    rate = expected_rate(profile, fleet.ranks)
    if row is None or rate is None or rate.read_from != "scaling":
        return None
    source = f"measured on {plural(row.nodes, 'node')}"
    efficiency = PlanFigure(
        value=min(1.0, row.efficiency), basis="measured", source=source
    )
    rate_of_all = PlanFigure.on("measured", rate.interval, source)
    return AllRanks(
        units_per_s=rate_of_all, efficiency=efficiency, rows=row.micro_batch_size
    )


def _on_all(
    known: Plan,
    subject: _Subject,
    assumed: Assumed | None,
    rate: PlanFigure,
    *,
    strategy: Strategy,
    max_micro_batch_size: int,
) -> AllRanks:
    """Predict the throughput of all ranks.

    It follows from measured links, or else from an assumed line rate.
    """
    train, fleet, profile = subject.train, subject.fleet, subject.measured
    evidence, scaled = Evidence() if profile is None else profile.evidence, None
    network, probe = evidence.network, evidence.probe
    line = assumed or (
        None if joins_nodes(network) else Assumed(bits_per_s=LINE_BITS_PER_S)
    )
    computed = network is not None or (
        probe is not None and probe.curve and probe.parameters is not None
    )
    if profile is not None and probe is not None and computed:
        scaled = known_of(profile, assumed=line, ranks_per_node=fleet.ranks_per_node)
    per_row, parameters = (
        known.units_per_size.value,
        1 if known.memory is None else known.memory.parameters.value,
    )
    compute = RankCompute(  # a rank with the given rate and no other costs
        sequence_s=per_row / rate.value,
        micro_batch_s=0.0,
        optimizer_step_s=0.0,
        gradients=gradient_parts(train, round(parameters)),
    )
    load = Load(
        compute=compute if scaled is None else scaled.load.compute,
        global_batch_size=known.global_batch_size,
        tokens_per_sequence=per_row,
        max_micro_batch_size=max_micro_batch_size,
    )
    links: tuple[Basis, str]
    if scaled is not None and line is None:
        links, over = ("predicted", f"predicted: {scaled.sources[1]}"), scaled.network
    else:
        line = line or Assumed(bits_per_s=LINE_BITS_PER_S)
        told = (
            f"assumed NIC of {line.bits_per_s / 1e9:g} Gbit/s per node at"
            f" {100 * ASSUMED_LINE_SHARE:.0f} % of its rate, without losses inside"
            " nodes"
        )
        trees, ranks = fleet.device == "cuda", fleet.ranks_per_node
        links, over = (
            ("assumed", told),
            Network(nodes=2, ranks_per_node=ranks, between=line.link, trees=trees),
        )
    strategies = ("fsdp2", "hsdp") if strategy == "fsdp2" else (strategy,)
    among = gradient_syncs(
        sixteen_bit=train.parallel.gradient_dtype != "fp32", strategies=strategies
    )
    return spread(
        rate,
        ScalingModel(load=load, network=over, gradient_syncs=among),
        nodes=fleet.nodes,
        links=links,
    )


def _next(asked: PlanRequest, subject: _Subject, memory: MemoryPlan | None) -> str:
    """Return the command to run next.

    It replaces assumptions by measurements, or else starts the training.
    """
    stored, nodes, length = (
        subject.stored,
        subject.fleet.nodes,
        subject.train.seq_length_tokens,
    )
    if (
        stored is None
        or subject.measured is None
        or stored.profile.evidence.probe is None
    ):
        model, gpu, ranks = (
            asked.model_argument or subject.train.model.name,
            subject.gpu_model,
            subject.fleet.ranks,
        )
        if memory is not None and not memory.max_micro_batch_size and gpu is not None:
            return command(
                "estimate",
                model=model,
                gpu=gpu.key,
                ranks=ranks,
                what_if=True,
                seq_length=length,
            )
        return command(
            "probe", model=model, data=asked.data or "DIR", seq_length=length
        )
    evidence, path = stored.profile.evidence, stored.path
    if nodes > 1 and not joins_nodes(evidence.network):
        return command("network", path, slurm=True)
    if nodes > 1:
        return command("train", path, nodes=nodes, slurm=True)
    return command("workers" if evidence.workers is None else "train", path)
