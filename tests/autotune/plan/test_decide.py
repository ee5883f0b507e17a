import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.errors import BadInput
from autotune.evidence.plan import Fleet, Goal, PlanFigure
from autotune.memory.values import MemoryParts, Share
from autotune.network.decide.scaling_model import AllRanks
from autotune.plan.decide import Plan, plan_of
from autotune.subjects.mlm.memory.values import MemoryPlan

GPUS = Fleet(
    device="cuda", name="NVIDIA H200", nodes=4, ranks_per_node=8, memory_bytes=2**37
)
NOTHING_HELD = MemoryParts(
    parameters_bytes=1,
    gradients_bytes=0,
    optimizer_bytes=0,
    activations_bytes=1,
    head_and_loss_bytes=0,
    temporaries_bytes=1,
    non_pytorch_bytes=0,
)
amounts = st.floats(1e6, 1e13)


def measured(value, basis="measured"):
    return PlanFigure(value=value, basis=basis, source="here")


MILLION = measured(1e6)


def memory(**fits):
    shares = tuple(
        Share(
            name=name,
            total_bytes=3,
            held=NOTHING_HELD,
            fits=fit,
            trains_here=name != "TP 2",
        )
        for name, fit in fits.items()
    )
    return MemoryPlan(
        shares=shares,
        micro_batch_size=1,
        max_micro_batch_size=0,
        source="a trace",
        parameters=measured(1e8),
        state=NOTHING_HELD,
        largest_bytes=1,
    )


def known(kind="units", amount=1e9, *, total=MILLION, ranks=None, **changes) -> Plan:
    """Return a plan's inputs; ``ranks`` are further figures of all ranks together."""
    values = {
        "model": "m",
        "goal": Goal(kind=kind, amount=amount, source=f"--{kind} {amount:g}"),
        "fleet": GPUS,
        "units_per_size": measured(500.0),
        "units_per_pass": measured(1e9),
        "global_batch_size": 1000,
        "rank_units_per_s": total and measured(total.value / 32),
        "price_per_device_hour": 2.0,
        "memory": memory(),
        "all_ranks": AllRanks(units_per_s=total, **ranks or {}),
        "next_command": "next",
    }
    return Plan(**values | changes)


def test_computes_figures_of_a_plan():
    planned = plan_of(known(amount=3.6e9))
    values = {
        "batch_units": 500_000,
        "steps": 7200,
        "wall_s": 3600,
        "device_hours": 32,
        "cost": 64,
        "passes": 3.6,
        "flops_6n": 6 * 1e8 * 3.6e9,
    }
    assert {name: getattr(planned, name).value for name in values} == pytest.approx(
        values
    )
    assert {getattr(planned, name).basis for name in values} == {"predicted"}
    assert (planned.units.basis, planned.by_nodes) == ("given", ())


def test_counts_cpu_hours_on_cpus():
    on_cpus = Fleet(
        device="cpu",
        name="A CPU",
        nodes=2,
        ranks_per_node=2,
        cpus_per_rank=4.0,
        memory_bytes=2**30,
    )
    assert plan_of(
        known(amount=3.6e9, fleet=on_cpus)
    ).device_hours.value == pytest.approx(16)


def test_assumed_rate_makes_figures_assumed():
    assumed = plan_of(known(amount=3.6e9, total=measured(1e6, "assumed")))
    figures = (
        "batch_units",
        "steps",
        "passes",
        "flops_6n",
        "wall_s",
        "device_hours",
        "cost",
    )
    assert {name for name in figures if getattr(assumed, name).basis == "assumed"} == {
        "wall_s",
        "device_hours",
        "cost",
    }


@given(amounts, st.sampled_from(["flops", "epochs", "steps", "hours"]))
def test_goals_of_every_kind_agree(tokens, kind):
    plain = plan_of(known(amount=tokens))
    amounts = {
        "flops": plain.flops_6n,
        "epochs": plain.passes,
        "steps": plain.steps,
        "hours": plain.wall_s,
    }
    planned = plan_of(
        known(kind, amounts[kind].value / (3600 if kind == "hours" else 1))
    )
    rounding = 500_000 if kind == "steps" else 1e-6 * tokens
    assert planned.units.value == pytest.approx(tokens, abs=rounding)
    assert planned.wall_s.value == pytest.approx(
        plain.wall_s.value, abs=1 + rounding / 1e6
    )
    given_back = {
        "epochs": planned.passes,
        "hours": planned.wall_s,
        "steps": planned.steps,
    }
    assert {figure.basis for name, figure in given_back.items() if name == kind} <= {
        "given"
    }


@given(amounts, st.floats(1.0, 100.0))
def test_more_tokens_take_no_less(tokens, factor):
    less, more = (plan_of(known(amount=n)) for n in (tokens, tokens * factor))
    # All tokens, and no more than they must.
    assert less.steps.value == max(1, math.ceil(tokens / 500_000))
    for name in ("steps", "wall_s", "device_hours", "cost", "flops_6n", "passes"):
        assert getattr(more, name).value >= getattr(less, name).value


def test_missing_rate_keeps_the_other_figures():
    figures = ["steps", "wall_s", "cost", "device_hours", "flops_6n"]
    for changes, missing in (
        ({"total": None}, ["wall_s", "cost", "device_hours"]),
        ({"memory": None}, ["flops_6n"]),
    ):
        planned = plan_of(known(**changes))
        assert [name for name in figures if getattr(planned, name) is None] == missing
        assert planned.steps.value == 2000


@pytest.mark.parametrize(
    ("changes", "option"),
    [
        ({"kind": "epochs", "units_per_pass": None}, "--data"),
        ({"kind": "flops", "memory": None, "memory_missing": "not traced"}, "--tokens"),
        ({"kind": "hours", "total": None, "rate_missing": "no peak"}, "--units-per-s"),
    ],
    ids=["epochs", "FLOPs", "hours"],
)
def test_missing_input_names_its_option(changes, option):
    with pytest.raises(BadInput) as caught:
        plan_of(known(amount=2.0, **changes))
    assert option in caught.value.next_step


SLOW, QUICK = (
    {"efficiency": PlanFigure(value=share, basis="assumed", source="lines")}
    for share in (0.5, 0.95)
)
NO_WAY, BY_FORMULA = (
    {"DDP": False, "FSDP": False, "TP 2": fits} for fits in (False, True)
)


@pytest.mark.parametrize(
    ("changes", "warning"),
    [
        ({"amount": 2e9}, ""),
        ({"amount": 41e9}, "Muennighoff et al. 2023"),
        (
            {"ranks": SLOW | {"useful_nodes": 2}},
            (
                "4 nodes reach 50.0 % efficiency (assumed). With this batch, at most 2"
                " reach 90 %. For changes that help, run autotune network PROFILE"
                " --predict."
            ),
        ),
        ({"ranks": SLOW}, "at most 1 reaches 90 %"),
        ({"ranks": QUICK}, ""),
        ({"memory": memory(DDP=True)}, ""),
        ({"memory": memory(**NO_WAY)}, "more or larger GPUs"),
        (
            {"memory": memory(**BY_FORMULA)},
            "By formula it fits with TP 2, which this trainer does not support",
        ),
        ({"memory": memory(**BY_FORMULA | {"FSDP": True})}, "It fits with FSDP"),
    ],
    ids=[
        "nothing",
        "many epochs",
        "few useful nodes",
        "one useful node",
        "efficient nodes",
        "fits",
        "fits nothing",
        "fits by formula only",
        "fits with FSDP",
    ],
)
def test_warns_only_of_what_applies(changes, warning):
    words = "\n".join(plan_of(known(**{"amount": 2e9} | changes)).warnings)
    assert (warning in words) if warning else words == ""


def test_shows_plan_on_fewer_nodes():
    inputs = {
        "amount": 3.6e9,
        "ranks": {"efficiency_by_nodes": {1: 1.0, 2: 0.8, 4: 0.5}},
    }
    first, _, last = plan_of(
        known(**inputs, rank_units_per_s=measured(62_500.0))
    ).by_nodes
    assert [
        last.nodes,
        last.units_per_s,
        last.wall_s,
        last.device_hours,
        last.cost,
    ] == [4, 1e6, 3600, 32, 64]
    assert (first.nodes, first.efficiency, first.device_hours) == (1, 1.0, 16)
    assert {
        alternative.cost
        for alternative in plan_of(known(**inputs, price_per_device_hour=None)).by_nodes
    } == {None}
    assert plan_of(known(**inputs, total=None)).by_nodes == ()
