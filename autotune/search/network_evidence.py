"""What a network tuning found, as the profile keeps it."""

from collections.abc import Sequence
from typing import Any

from autotune.core.evidence import NetworkEvidence
from autotune.decide.links import link_warnings
from autotune.decide.scaling import exchanges
from autotune.search.network import ROUNDS, NetworkTuning
from autotune.search.scaling import ScalingModel, predict_scaling

MOST_NODES = 128
"""Of the table in a profile."""
_AS_MEASURED = ("nodes", "ranks_per_node", "backend", "interface", "interface_bytes_per_s", "transport")
_OF_LINKS = (*_AS_MEASURED, "links", "all_reduce_factor", "warnings", "products_flops_per_s")


def evidence(tuning: NetworkTuning, counts: Sequence[int] = ()) -> NetworkEvidence:
    """Return what is known of links and, if steps were measured, of exchanges and of how far nodes are useful.

    Predicted for powers of two nodes, unless counts are given.

    Raises:
        ValueError: If no links were measured.
    """
    links, between = tuning.links, tuning.fits.get("between nodes")
    if links is None:
        raise ValueError("no links were measured")
    of_links: dict[str, Any] = {name: getattr(links, name) for name in _AS_MEASURED}
    found = NetworkEvidence(
        **of_links,
        links=list(tuning.fits.values()),
        all_reduce_factor=tuning.all_reduce_factor,
        warnings=link_warnings(links, None if between is None else between.bytes_per_s),
        products_flops_per_s=list(links.products_flops_per_s),
        choice="only the links were measured",
        windows=len(tuning.runner.finished),
        seconds=round(tuning.runner.seconds, 3),
    )
    if tuning.compute is None or not tuning.tried:
        return found
    default, config, load = tuning.tried[0], tuning.request.config, tuning.load()
    of_steps: dict[str, Any] = {
        "default_rows": config.micro_batch_rows,
        "compute": tuning.compute.model_copy(update={"slowdown_share": tuning.slowdown_share}),
        "exchanges": [
            one.evidence(links.ranks_per_node, None if one is default else tuning.against(default, one))
            for one in tuning.tried
        ],
        "choice": _choice(tuning),
        "equal_loss": tuning.equal_loss,
    }
    if between is not None:
        halved = tuning.fastest()[0].candidate.exchange.gradient_dtype != "fp32"
        among, ends = exchanges(sixteen_bit=halved), between.ends
        known = ScalingModel(load=load, network=tuning.network(), ends=ends, exchanges=among)
        most = min(MOST_NODES, max(1, load.global_batch_rows // links.ranks_per_node))
        powers = [2**exponent for exponent in range(12) if 2**exponent <= most]
        scaling = predict_scaling(config.model.name, known, counts or powers, None)
        of_steps |= {
            "scaling": list(scaling.rows), "useful_nodes": scaling.useful_nodes, "levers": list(scaling.levers)
        }  # fmt: skip
    return found.model_copy(update=of_steps)


def links_in_place_of(before: NetworkEvidence | None, links: NetworkEvidence) -> NetworkEvidence:
    """Return what is known once links were measured again: steps stay as they were, unless other ranks ran them."""
    if before is None or (before.nodes, before.ranks_per_node) != (links.nodes, links.ranks_per_node):
        return links
    return before.model_copy(update={name: getattr(links, name) for name in _OF_LINKS})


def _choice(tuning: NetworkTuning) -> str:
    rounds, (chosen, gain) = len(tuning.tried[0].figures), tuning.fastest()
    if rounds < ROUNDS:
        return f"the default: there was time for {rounds} of {ROUNDS} rounds, which prove nothing; --minutes gives more"
    if gain is None:
        return "the default: nothing that was measured is proven to be faster"
    interval = "" if gain.low is None or gain.high is None else f" ({gain.low:.2f} to {gain.high:.2f})"
    name = chosen.candidate.exchange.name
    return f"{name}: {gain.value:.2f} times the default's real tokens/s{interval} at this global batch"
