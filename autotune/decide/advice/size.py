"""Advice on a model that leaves its device little room: the paper's fifth recommendation, with the ledger."""

from autotune.core.advice import Advice, Change, Figure, Gain
from autotune.core.allocations import Term
from autotune.decide.advice.situation import Situation, faster_with
from autotune.decide.sharding import StateBytes, model_share, state_of_terms, zero_share

STATE_SHARE = 0.4
"""Of the budget that weights, gradients and optimizer take, from which on sharing them is worth a look."""
WORTH_RATIO = 1.03
_STATE_TERMS = (Term.PARAMETERS, Term.GRADIENTS, Term.OPTIMIZER)
_LAYER_SHARE = 1 / 8
"""Of the weights, that FSDP gathers at once, at most; the embeddings are the largest unit of most encoders."""


def too_big(now: Situation) -> Advice | None:
    """State that takes the room of a micro-batch: what sharing it would leave, and what that is worth."""
    probe, budget, train = now.probe, now.budget_bytes, now.train
    if (
        train is None
        or probe is None
        or budget is None
        or not probe.traced_terms_bytes
        or train.parallel.strategy != "ddp"
    ):
        return None
    terms = probe.traced_terms_bytes
    state_bytes = sum(terms.get(name, 0) for name in _STATE_TERMS)
    ranks = _ranks(now)
    if state_bytes < STATE_SHARE * budget or ranks < 2:
        return None
    ledgers = {name: _shared(now, ranks, stage) for name, stage in (("ddp", 0), ("zero1", 1), ("fsdp2", 3))}
    rows = {name: _rows(now, size) for name, size in ledgers.items()}
    best = "zero1" if rows["zero1"] >= 0.9 * rows["fsdp2"] else "fsdp2"
    speed = faster_with(now, rows["ddp"], rows[best])
    gain = Gain(of="GPU memory", ratio=ledgers[best] / ledgers["ddp"], known="predicted")
    if speed is not None and speed[1] >= WORTH_RATIO:
        gain = Gain(of="real tokens/s", ratio=speed[1], low=min(1.0, speed[0]), high=speed[2], known="predicted")
    tensor = model_share(_state(now), 2, 1).total_bytes
    return Advice(
        rule="too-big-for-ddp",
        severity="should" if gain.of == "real tokens/s" else "could",
        claim=f"weights, gradients and optimizer take {state_bytes / budget:.0%} of the memory, on every rank the "
        f"same. {best} over {ranks} ranks leaves room for {rows[best]} rows instead of {rows['ddp']}",
        evidence=(
            *(
                Figure(name=f"memory of {probe.feasible_max} rows with {name}", value=float(size), unit="bytes",
                       known="predicted", source="the traced ledger, shared out")
                for name, size in ledgers.items()
            ),
            Figure(name=f"memory of {probe.feasible_max} rows with two tensor-parallel ranks", value=float(tensor),
                   unit="bytes", known="predicted", source="the traced ledger, shared out"),
        ),
        gain=gain,
        cost="weights travel as well as gradients; within a node that costs little, between nodes it may cost more "
        "than it brings; this trainer has no tensor parallelism",
        changes=(Change(key="parallel.strategy", old="ddp", new=best),),
        command=now.command("network", "--profile", now.profile_path),
        would_change="throughput that has levelled off: then a larger micro-batch is worth nothing",
    )  # fmt: skip


def _ranks(now: Situation) -> int:
    if now.run is not None:
        return now.run.header.world_size
    nodes = now.spread.nodes if now.spread is not None else 1
    if now.profile is None:
        return nodes
    return nodes * max(now.profile.local_ranks, now.profile.fingerprint.gpu_count)


def _state(now: Situation) -> StateBytes:
    assert now.probe is not None
    return state_of_terms(now.probe.traced_terms_bytes)


def _shared(now: Situation, ranks: int, stage: int) -> int:
    """Bytes of a rank with the largest micro-batch that fits without sharing."""
    state = _state(now)
    return zero_share(state, stage, ranks, largest_layer_bytes=int(_LAYER_SHARE * state.parameters_bytes)).total_bytes


def _rows(now: Situation, total_bytes: int) -> int:
    """Rows that fit when so many bytes hold the largest micro-batch."""
    assert now.probe is not None and now.budget_bytes is not None
    state = _state(now)
    per_row = (state.activations_bytes + state.head_and_loss_bytes) / now.probe.feasible_max
    free = now.budget_bytes - total_bytes
    return max(1, int(now.probe.feasible_max + free / max(1.0, per_row)))
