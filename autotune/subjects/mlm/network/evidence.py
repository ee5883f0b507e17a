"""Evidence of links, gradient synchronisations and scaling."""

from typing import Any

from autotune.evidence.network import NetworkEvidence
from autotune.network.decide.link_fit import link_warnings
from autotune.network.decide.scaling_model import ScalingModel, gradient_syncs
from autotune.network.scaling import predict_scaling
from autotune.subjects.mlm.network.measure import ROUNDS, NetworkTuning

TABLE_NODES = 128
"""Largest number of nodes in the scaling table of a profile."""
_AS_MEASURED = (
    "nodes",
    "ranks_per_node",
    "backend",
    "interface",
    "interface_bytes_per_s",
    "transport",
)


def evidence(tuning: NetworkTuning) -> NetworkEvidence:
    """Return the evidence of links, gradient synchronisations and scaling.

    Scaling is to powers of two of nodes.
    """
    assert tuning.links is not None
    links, fits = tuning.links.figures, tuning.links.fits
    between = fits.get("between nodes")
    assert tuning.compute is not None
    default, config, load = tuning.tried[0], tuning.request.config, tuning.load()
    more: dict[str, Any] = {name: getattr(links, name) for name in _AS_MEASURED}
    if between is not None:
        among = gradient_syncs(
            sixteen_bit=tuning.fastest()[0].candidate.sync.gradient_dtype != "fp32"
        )
        known = ScalingModel(
            load=load, network=tuning.network(), gradient_syncs=among, ends=between.ends
        )
        most = min(TABLE_NODES, max(1, load.global_batch_size // links.ranks_per_node))
        powers = [2**exponent for exponent in range(most.bit_length())]
        scaling = predict_scaling(config.model.name, known, powers)
        more |= {
            "scaling": [*scaling.rows],
            "useful_nodes": scaling.useful_nodes,
            "levers": [*scaling.levers],
        }
    return NetworkEvidence(
        links=list(fits.values()),
        all_reduce_factor=tuning.links.all_reduce_factor,
        warnings=link_warnings(links, None if between is None else between.bytes_per_s),
        matmul_flops_per_s=list(links.matmul_flops_per_s),
        default_micro_batch_size=config.micro_batch_size,
        compute=tuning.compute.model_copy(
            update={"slowdown_share": tuning.slowdown_share}
        ),
        gradient_syncs=[
            one.evidence(
                links.ranks_per_node,
                None if one is default else tuning.against_default(one),
            )
            for one in tuning.tried
        ],
        choice=_choice(tuning),
        equal_loss=tuning.equal_loss,
        windows=len(tuning.runner.finished),
        seconds=round(tuning.runner.seconds, 3),
        **more,
    )


def _choice(tuning: NetworkTuning) -> str:
    rounds, (chosen, gain) = len(tuning.tried[0].figures), tuning.fastest()
    if rounds < ROUNDS:
        return (
            f"the default: only {rounds} of {ROUNDS} rounds ran, too few to decide;"
            " increase --time-limit"
        )
    if gain is None:
        return "the default: no candidate is faster at 98 % confidence"
    times = (
        f"{gain.value:.2f} times the default's non-padding tokens/s ({gain.low:.2f} to"
        f" {gain.high:.2f})"
    )
    return f"{chosen.candidate.sync.name}: {times} at this global batch"
