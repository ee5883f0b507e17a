"""How fast the machines of a plan train: by a profile's measurements if there are any, else as is assumed."""

from dataclasses import dataclass

from autotune.core.network import Network, RankCompute
from autotune.core.plan import Basis, Fleet, PlanFigure
from autotune.core.profile import Profile
from autotune.decide.rates import expected_rate, tuned_rate
from autotune.decide.scaling import AllRanks, Load, exchanges, spread
from autotune.decide.shape import gradients_of_shape
from autotune.search.scaling import ASSUMED_LINE_SHARE, Assumed, joins_nodes, known_of
from trainer.config import TrainConfig
from trainer.peaks import peak_flops_per_s, product_format

MFU = (0.256 * 0.327) ** 0.5
MFU_SOURCE = (
    f"MFU of {100 * MFU:.1f} %: between the 25.6 and 32.7 % of ModernBERT base and large on 8 H100, the best published "
    "in bf16 up to 400 M parameters; 45 % is this project's aim, and not measured"
)
LINE_BITS_PER_S = 100e9
"""If nothing is said of a node's NIC."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What ranks are given to do, and on what."""

    train: TrainConfig
    fleet: Fleet
    profile: Profile | None
    """That was measured on these machines."""
    flops_per_token: PlanFigure | None
    tokens_per_row: float
    batch_rows: int
    most_rows: int
    """Of a micro-batch."""
    parameters: int | None
    strategy: str
    """The simplest of the trainer's under which the model fits: ``ddp``, ``zero1`` or ``fsdp2``."""


def rank_rate(work: Work) -> PlanFigure | str:
    """Return the real tokens/s of one rank on one node; without one, why."""
    train, fleet = work.train, work.fleet
    measured = None if work.profile is None else tuned_rate(work.profile)
    if measured is not None:
        ranks = measured.ranks
        source = f"{measured.source}, {ranks} rank{'s' if ranks > 1 else ''}"
        return PlanFigure.on("measured", measured.interval.scaled(1 / ranks), source)
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
    return PlanFigure(
        value=full * MFU * peak / work.flops_per_token.value,
        basis="assumed",
        source=f"{peak / 1e12:g} TFLOP/s {kind} (dense, data sheet) times an assumed {MFU_SOURCE}",
    )


def on_all(work: Work, *, rate: PlanFigure, assumed: Assumed | None, own_batch: bool) -> AllRanks:
    """Return all ranks together.

    ``own_batch`` says whether the batch is the profile's, so that what was measured with it counts.
    """
    train, fleet, profile = work.train, work.fleet, work.profile
    if own_batch and assumed is None and (found := _as_measured(work)) is not None:
        return found
    network = None if profile is None else profile.evidence.network
    line = assumed or (None if joins_nodes(network) else Assumed(bits_per_s=LINE_BITS_PER_S))
    probe, known = None if profile is None else profile.evidence.probe, None
    computed = network is not None and network.compute is not None
    if profile is not None and probe is not None and (computed or (probe.curve and probe.parameters is not None)):
        known = known_of(profile, assumed=line, ranks_per_node=fleet.ranks_per_node)  # as ``scale`` would
    compute = RankCompute(  # a rank whose rows cost what the rate says, and nothing else
        row_s=work.tokens_per_row / rate.value,
        micro_batch_s=0.0,
        update_s=0.0,
        gradients=gradients_of_shape(train, work.parameters or 1),
    )
    load = Load(
        compute=compute if known is None else known.load.compute,
        global_batch_rows=work.batch_rows,
        real_tokens_per_row=work.tokens_per_row,
        most_rows=max(1, work.most_rows),
    )
    links: tuple[Basis, str]
    if known is not None and line is None:
        links, over = ("predicted", f"predicted: {known.sources[1]}"), known.network
    else:
        line = line or Assumed(bits_per_s=LINE_BITS_PER_S)
        told = (
            f"node links of {line.bits_per_s / 1e9:g} Gbit/s assumed, {100 * ASSUMED_LINE_SHARE:.0f} % of it reached; "
            "nothing is lost within nodes"
        )
        trees, ranks = fleet.device == "cuda", fleet.ranks_per_node
        links, over = ("assumed", told), Network(nodes=2, ranks_per_node=ranks, between=line.link, trees=trees)
    strategies = ("fsdp2", "hsdp") if work.strategy == "fsdp2" else (work.strategy,)
    among = exchanges(sixteen_bit=train.parallel.gradient_dtype != "fp32", strategies=strategies)
    return spread(rate, load, over, among=among, nodes=fleet.nodes, links=links)


def _as_measured(work: Work) -> AllRanks | None:
    """Return a step of the same batch on as many nodes, if it ran."""
    profile, fleet = work.profile, work.fleet
    network = None if profile is None else profile.evidence.network
    if profile is None or network is None or network.ranks_per_node != fleet.ranks_per_node:
        return None
    row = next((row for row in network.scaling if row.nodes == fleet.nodes and row.measured), None)
    rate = expected_rate(profile, fleet.ranks)
    if row is None or rate is None or rate.read_from != "scaling":
        return None
    source = f"measured on {row.nodes} nodes"
    return AllRanks(
        tokens_per_s=PlanFigure.on("measured", rate.interval, source),
        efficiency=PlanFigure(value=min(1.0, row.efficiency), basis="measured", source=source),
        micro_batches=row.micro_batches,
        rows=row.rows,
    )
