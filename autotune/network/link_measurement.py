"""Links between ranks, measured by all-reduces of several sizes."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from autotune.evidence.network import Link, LinkEvidence, Network, Scope
from autotune.network.decide.link_fit import fit_link
from autotune.network.decide.step_model import all_reduce_factor
from autotune.network.values import LinksRequest
from autotune.trials.job_figures import LinkFigures
from autotune.trials.rounds import Rounds

SIZES_BYTES = {
    device: [2**exponent for exponent in range(12, end, 2)]
    for device, end in (("cpu", 27), ("cuda", 29))
}
"""From 4 KiB to 64 MiB on CPUs, to 256 MiB on GPUs: NVLink and InfiniBand reach their
bandwidth only beyond 64 MiB."""
REPEATS, SIZE_SECONDS = 12, 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredLinks:
    """Links between ranks, as measured and as fitted."""

    figures: LinkFigures
    """Times of messages."""
    fits: Mapping[Scope, LinkEvidence]
    """Fitted links by scope, if at least two members were measured."""
    trees: bool
    """True if all-reduces may use a tree, as with NCCL."""

    @property
    def all_reduce_factor(self) -> float:
        """Measured over predicted time of all-reduces over all ranks."""
        return all_reduce_factor(self.figures.all, self._network(1.0))

    @property
    def network(self) -> Network:
        """The measured network.

        On a single node, the link between nodes equals the one within.
        """
        return self._network(self.all_reduce_factor)

    def _network(self, factor: float) -> Network:
        within = self.fits.get("within nodes")
        between = self.fits.get("between nodes", within)
        return Network(
            nodes=self.figures.nodes,
            ranks_per_node=self.figures.ranks_per_node,
            between=(
                Link(latency_s=0.0, bytes_per_s=1e30)
                if between is None
                else between.link
            ),
            within=None if within is None else within.link,
            trees=self.trees,
            all_reduce_factor=factor,
        )


def measure_links(
    rounds: Rounds,
    device: Literal["cpu", "cuda"],
    *,
    nodes: int,
    ranks_per_node: int,
    timeout_s: float,
    data_dir: str = "",
) -> MeasuredLinks:
    """Measure all-reduces and matmuls of ranks that have joined.

    Args:
        rounds: Measurement on a machine of several ranks.
        device: Device of the ranks.
        nodes: Number of nodes.
        ranks_per_node: Ranks on each node.
        timeout_s: Time limit of the trial.
        data_dir: Directory of the dataset; the job does not read it.

    Raises:
        Undecided: If they could not be measured.
    """
    request = LinksRequest(
        sizes_bytes=SIZES_BYTES[device],
        repeats=REPEATS,
        seconds=SIZE_SECONDS,
        nodes=nodes,
        ranks_per_node=ranks_per_node,
    )
    trial = request.trial(timeout_s=timeout_s, data_dir=data_dir)
    outcome = rounds.measure_window(trial, "links")
    measured = rounds.runner.require_measured("network links", outcome)
    figures = LinkFigures.of(measured)
    trees = figures.backend.startswith("nccl")
    fits: dict[Scope, LinkEvidence] = {}
    if figures.within:
        fits["within nodes"] = fit_link(
            figures.within, figures.ranks_per_node, "within nodes", trees=trees
        )
    if figures.between:
        fits["between nodes"] = fit_link(figures.between, figures.nodes, trees=trees)
    return MeasuredLinks(figures=figures, fits=fits, trees=trees)
