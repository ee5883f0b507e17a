"""How fast the machines of a plan train: by a profile's measurements where there are any, else as is assumed."""

from dataclasses import dataclass

from autotune.core.network import Link, Network, RankCompute
from autotune.core.plan import Basis, Figure
from autotune.core.profile import Profile
from autotune.decide.rates import expected_rate, tuned_rate
from autotune.decide.scaling import Load, exchanges
from autotune.decide.shape import gradients_of_shape
from autotune.decide.spread import Links, Spread, spread
from autotune.search.plan_subject import Subject
from autotune.search.scaling import ASSUMED_LINE_SHARE, Assumed, Known, known_of
from trainer.config import TrainConfig
from trainer.peaks import peak_flops_per_s, product_format

MFU_LOW, MFU_HIGH = 0.256, 0.327
MFU = (MFU_LOW * MFU_HIGH) ** 0.5
MFU_SOURCE = (
    f"MFU of {100 * MFU_LOW:.1f} to {100 * MFU_HIGH:.1f} %: ModernBERT base and large on 8 H100, the best published in "
    "bf16 up to 400 M parameters; 45 % is this project's aim, and not measured"
)
LINES_BITS_PER_S = (25e9, 100e9, 400e9)
"""Where nothing is said of a node's card: 25 GbE, 100 and 400 Gbit/s InfiniBand."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What a rank is given to do."""

    flops_per_token: Figure | None
    tokens_per_row: float
    batch_rows: int
    most_rows: int
    """Of a micro-batch."""
    parameters: int | None
    strategy: str
    """The simplest of the trainer's under which the model fits: ``ddp``, ``zero1`` or ``fsdp2``."""


def rank_rate(subject: Subject, work: Work, told: float | None) -> Figure | str:
    """Real tokens/s of one rank on one node; where there is none, why.

    Args:
        subject: The model and the machines.
        work: What a rank has to do.
        told: By the user.
    """
    if told is not None:
        return Figure(value=told, basis="given", source="--tokens-per-s")
    measured = None if subject.measured is None else tuned_rate(subject.measured)
    if measured is not None:
        known = measured.interval.scaled(1 / measured.ranks)
        return Figure(
            value=known.value,
            low=known.low,
            high=known.high,
            confidence=known.confidence,
            basis="measured",
            source=f"{measured.source}, {measured.ranks} rank{'s' if measured.ranks > 1 else ''}",
        )
    return _assumed_rate(subject, work)


def _assumed_rate(subject: Subject, work: Work) -> Figure | str:
    fleet, train = subject.fleet, subject.train
    if fleet.device == "cpu":
        return "no rate was measured on this CPU, and none can be assumed of a CPU"
    kind = product_format(train.precision, tf32=train.tf32)
    peak = peak_flops_per_s(fleet.name, kind)
    if peak is None:
        return f"the dense {kind} peak of {fleet.name} is not in the table"
    if work.flops_per_token is None:
        return f"what {train.model.name} computes for a token is not known"
    # That share is of real tokens without padding; padded rows cost their padding as well.
    full = work.tokens_per_row / train.seq_length_tokens if train.layout == "padded" else 1.0
    low, value, high = (full * mfu * peak / work.flops_per_token.value for mfu in (MFU_LOW, MFU, MFU_HIGH))
    source = f"{peak / 1e12:g} TFLOP/s {kind} (dense, data sheet) times an assumed {MFU_SOURCE}"
    return Figure(value=value, low=low, high=high, basis="assumed", source=source)


def on_all(subject: Subject, work: Work, rate: Figure, assumed: Assumed | None, *, own_batch: bool) -> Spread | None:
    """All ranks together; None where the batch cannot be dealt to them.

    Args:
        subject: The model and the machines.
        work: What a rank has to do.
        rate: Of one rank.
        assumed: What the user says of links between nodes.
        own_batch: Whether the batch is the profile's, so that what was measured with it counts.
    """
    profile, fleet = subject.measured, subject.fleet
    if profile is not None and own_batch and assumed is None:
        found = _as_measured(profile, subject)
        if found is not None:
            return found
    known = None if profile is None else _known(profile, subject, assumed)
    compute = known.load.compute if known is not None else _compute(subject.train, work, rate)
    load = Load(
        compute=compute,
        global_batch_rows=work.batch_rows,
        real_tokens_per_row=work.tokens_per_row,
        most_rows=max(1, work.most_rows),
    )
    among = exchanges(sixteen_bit=subject.train.parallel.gradient_dtype != "fp32", strategies=_strategies(work))
    return spread(rate, load, _links(subject, known, assumed), among, fleet.nodes)


def _strategies(work: Work) -> tuple[str, ...]:
    return ("fsdp2", "hsdp") if work.strategy == "fsdp2" else (work.strategy,)


def _as_measured(profile: Profile, subject: Subject) -> Spread | None:
    """A step of the same batch on as many nodes, where it ran."""
    network, fleet = profile.evidence.network, subject.fleet
    if network is None or network.ranks_per_node != fleet.ranks_per_node:
        return None
    row = next((row for row in network.scaling if row.nodes == fleet.nodes and row.measured), None)
    rate = expected_rate(profile, fleet.ranks)
    if row is None or rate is None or rate.read_from != "scaling":
        return None
    source, known = f"measured on {row.nodes} nodes", rate.interval
    return Spread(
        tokens_per_s=Figure(
            value=rate.value,
            low=known.low,
            high=known.high,
            confidence=known.confidence,
            basis="measured",
            source=source,
        ),
        efficiency=Figure(value=min(1.0, row.efficiency), basis="measured", source=source),
        micro_batches=row.micro_batches,
        rows=row.rows,
    )


def _known(profile: Profile, subject: Subject, assumed: Assumed | None) -> Known | None:
    """What ``scale`` would start from; None where no probe says what rows cost and how large the model is."""
    probe, network = profile.evidence.probe, profile.evidence.network
    computed = network is not None and network.compute is not None
    if probe is None or not (computed or (probe.curve and probe.parameters is not None)):
        return None
    between = network is not None and any(link.scope == "between nodes" for link in network.links)
    return known_of(
        profile,
        assumed=assumed or (None if between else Assumed(bits_per_s=LINES_BITS_PER_S[1])),
        ranks_per_node=subject.fleet.ranks_per_node,
        global_batch_tokens=None,
        sixteen_bit=False,
    )


def _compute(train: TrainConfig, work: Work, rate: Figure) -> RankCompute:
    """A rank whose rows cost what the rate says, and nothing else."""
    gradients = gradients_of_shape(train, work.parameters or 1)
    return RankCompute(row_s=work.tokens_per_row / rate.value, micro_batch_s=0.0, update_s=0.0, gradients=gradients)


def _links(subject: Subject, known: Known | None, assumed: Assumed | None) -> Links:
    """Measured ones; else of the line that the user names; else of lines from slow to fast."""
    profile = subject.measured
    network = None if profile is None else profile.evidence.network
    measured = network is not None and any(link.scope == "between nodes" for link in network.links)
    if known is not None and measured and assumed is None:
        basis: Basis = "predicted"
        return Links(
            worse=known.worse or known.network,
            likely=known.network,
            better=known.better or known.network,
            basis=basis,
            source=f"predicted: {known.sources[1]}",
        )
    lines = [Assumed(bits_per_s=bits) for bits in LINES_BITS_PER_S] if assumed is None else [assumed] * 3
    worse, likely, better = (_network(line, subject) for line in lines)
    ends = dict.fromkeys(f"{line.bits_per_s / 1e9:g}" for line in (lines[0], lines[-1]))
    return Links(
        worse=worse,
        likely=likely,
        better=better,
        basis="assumed",
        source=f"node links of {' to '.join(ends)} Gbit/s assumed, {100 * ASSUMED_LINE_SHARE:.0f} % of it reached; "
        "nothing is lost within nodes",
    )


def _network(line: Assumed, subject: Subject) -> Network:
    return Network(
        nodes=2,
        ranks_per_node=subject.fleet.ranks_per_node,
        between=Link(latency_s=line.latency_s, bytes_per_s=ASSUMED_LINE_SHARE * line.bits_per_s / 8),
        trees=subject.fleet.device == "cuda",
    )
