import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.core.plan import Fleet, Goal, PlanFigure
from autotune.decide.plan import MemoryPlan, Optimal, Plan, optimal_for, plan_of
from autotune.decide.scaling import AllRanks
from autotune.decide.sharding import Share, StateBytes
from autotune.errors import BadInput

GPUS = Fleet(device="cuda", name="NVIDIA H200", nodes=4, ranks_per_node=8, memory_bytes=2**37)
amounts = st.floats(1e6, 1e13)
shares = st.floats(0, 0.8)


def measured(value, share=0.0):
    low, high = (value * (1 - share), value * (1 + share)) if share else (None, None)
    return PlanFigure(value=value, low=low, high=high, basis="measured", source="here")


NOTHING_HELD = StateBytes(
    parameters_bytes=1, gradients_bytes=0, optimizer_bytes=0, activations_bytes=1, head_and_loss_bytes=0,
    temporaries_bytes=1, outside_bytes=0,
)  # fmt: skip


def memory(**fits):
    shares = tuple(
        Share(name=name, total_bytes=3, held=NOTHING_HELD, fits=fit, trains_here=name != "TP 2")
        for name, fit in fits.items()
    )
    return MemoryPlan(
        shares=shares, micro_batch_rows=1, most_rows=0, source="a trace", parameters=measured(1e8), state=NOTHING_HELD,
        largest_bytes=1,
    )  # fmt: skip


MILLION = measured(1e6)


def known(kind="tokens", amount=1e9, *, total=MILLION, ranks=None, **changes) -> Plan:
    """What is known; ``ranks`` are what else is known of all of them together."""
    values = {
        "model": "m",
        "goal": Goal(kind=kind, amount=amount, source=f"--{kind} {amount:g}"),
        "fleet": GPUS,
        "tokens_per_row": measured(500.0),
        "tokens_per_pass": measured(1e9),
        "batch_rows": 1000,
        "rank_tokens_per_s": total and measured(total.value / 32),
        "all_ranks": AllRanks(tokens_per_s=total, **ranks or {}),
        "price_per_device_hour": 2.0,
        "memory": memory(),
        "next_command": "next",
    }
    return Plan(**values | changes)


def test_a_plan_by_hand():
    found = plan_of(known(amount=3.6e9))
    values = {
        "batch_tokens": 500_000, "steps": 7200, "wall_s": 3600, "device_hours": 32, "cost": 64, "passes": 3.6,
        "flops_6n": 6 * 1e8 * 3.6e9,
    }  # fmt: skip
    assert {name: getattr(found, name).value for name in values} == pytest.approx(values)
    assert {getattr(found, name).basis for name in values} == {"predicted"}
    assert (found.tokens.basis, found.by_nodes) == ("given", ())


@given(amounts, shares, st.floats(1e3, 1e9))
def test_tokens_give_hours_and_these_hours_give_the_tokens_back(tokens, share, rate):
    there = plan_of(known(amount=tokens, total=measured(rate, share)))
    back = plan_of(known("hours", there.wall_s.value / 3600, total=measured(rate, share)))
    assert back.tokens.value == pytest.approx(tokens)
    assert back.wall_s.basis == "given"
    assert back.cost.value == pytest.approx(there.cost.value)


@given(amounts, st.sampled_from(["flops", "epochs", "steps"]))
def test_every_way_to_say_how_long_comes_to_the_same_plan(tokens, kind):
    plain = plan_of(known(amount=tokens))
    amount = {"flops": plain.flops_6n.value, "epochs": plain.passes.value, "steps": plain.steps.value}[kind]
    other = plan_of(known(kind, amount))
    rounding = 500_000 if kind == "steps" else 1e-6 * tokens
    assert other.tokens.value == pytest.approx(tokens, abs=rounding)
    assert other.wall_s.value == pytest.approx(plain.wall_s.value, abs=1 + rounding / 1e6)


@given(amounts, st.floats(1.0, 100.0), shares)
def test_more_tokens_take_no_less_of_anything(tokens, factor, share):
    less, more = (plan_of(known(amount=n, total=measured(1e6, share))) for n in (tokens, tokens * factor))
    assert less.steps.value == max(1, math.ceil(tokens / 500_000))  # all tokens, and no more than they must
    for name in ("steps", "wall_s", "device_hours", "cost", "flops_6n", "passes"):
        assert getattr(more, name).value >= getattr(less, name).value
    assert more.optimal.parameters >= less.optimal.parameters


@given(amounts, st.floats(0.01, 0.9))
def test_time_and_cost_are_bounded_by_the_rate(tokens, share):
    found = plan_of(known(amount=tokens, total=measured(1e6, share)))
    for figure in (found.wall_s, found.device_hours, found.cost):
        assert figure.low <= figure.value <= figure.high
    assert found.wall_s.high == pytest.approx(tokens / (1e6 * (1 - share)))


def test_one_assumption_makes_everything_after_it_assumed_and_nothing_before_it():
    found = plan_of(known(total=PlanFigure(value=1e6, basis="assumed", source="a share of a peak")))
    assert found.wall_s.low is found.cost.high is None
    assert {one.basis for one in (found.wall_s, found.device_hours, found.cost)} == {"assumed"}
    assert found.steps.basis == "predicted"


def test_without_a_rate_or_parameters_the_rest_is_known():
    found = plan_of(known(total=None, rate_missing="nobody knows"))
    assert found.wall_s is found.cost is found.device_hours is None
    assert found.steps.value == 2000
    assert found.optimal is not None
    found = plan_of(known(memory=None, memory_missing="not traced"))
    assert found.flops_6n is found.optimal is None
    assert found.wall_s is not None


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"kind": "epochs", "tokens_per_pass": None}, "--data"),
        ({"kind": "flops", "memory": None, "memory_missing": "not traced"}, "--tokens"),
        ({"kind": "hours", "total": None, "rate_missing": "no peak"}, "--tokens-per-s"),
    ],
)
def test_what_cannot_be_turned_into_tokens_says_what_to_give(changes, said):
    with pytest.raises(BadInput) as caught:
        plan_of(known(amount=2.0, **changes))
    assert said in caught.value.next_step


def test_a_cpu_counts_its_processors():
    fleet = Fleet(device="cpu", name="A CPU", nodes=2, ranks_per_node=2, cpus_per_rank=4.0, memory_bytes=2**30)
    assert plan_of(known(amount=3.6e9, fleet=fleet)).device_hours.value == pytest.approx(16)


def words(**changes) -> str:
    return "\n".join(plan_of(known(**changes)).warnings)


def test_many_passes_are_said_with_their_source():
    assert "Muennighoff et al. 2023" in words(amount=41e9)
    assert "Muennighoff" not in words(amount=39e9)


@pytest.mark.parametrize(
    ("amount", "said"), [(1e8, "smaller model on more tokens"), (1e11, "larger model on fewer"), (2e9, "")]
)
def test_tokens_far_from_compute_optimal_are_said(amount, said):
    assert (said in words(amount=amount)) if said else words(amount=amount) == ""


def test_inefficient_nodes_are_said_with_how_many_are_useful():
    slow = PlanFigure(value=0.5, basis="assumed", source="lines")
    said = words(amount=2e9, ranks={"efficiency": slow, "useful_nodes": 2})
    assert "4 nodes are 50.0 % efficient (assumed)" in said
    assert "2 nodes are useful" in said
    assert "autotune scale" in said
    assert words(amount=2e9, ranks={"efficiency": replace(slow, value=0.95)}) == ""


def test_the_same_tokens_are_shown_on_fewer_nodes():
    there = {"amount": 3.6e9, "ranks": {"efficiency_by_nodes": {1: 1.0, 2: 0.8, 4: 0.5}}}
    found = plan_of(known(**there, rank_tokens_per_s=measured(62_500.0)))
    assert [(one.nodes, one.efficiency) for one in found.by_nodes] == [(1, 1.0), (2, 0.8), (4, 0.5)]
    last = found.by_nodes[-1]
    assert [last.tokens_per_s, last.wall_s, last.device_hours, last.cost] == pytest.approx([1e6, 3600, 32, 64])
    assert found.by_nodes[0].device_hours == pytest.approx(last.device_hours / 2)
    assert {one.cost for one in plan_of(known(**there, price_per_device_hour=None)).by_nodes} == {None}


@pytest.mark.parametrize(
    ("fits", "said"),
    [
        ({"DDP": False, "FSDP": True, "TP 2": True}, "it does with FSDP"),
        ({"DDP": False, "FSDP": False, "TP 2": True}, "which this trainer does not do"),
        ({"DDP": False, "FSDP": False, "TP 2": False}, "more or larger GPUs"),
    ],
)
def test_a_model_that_does_not_fit_alone_is_said_with_what_makes_it_fit(fits, said):
    assert said in words(amount=2e9, memory=memory(**fits))
    assert "fit" not in words(amount=2e9, memory=memory(DDP=True))


@pytest.mark.parametrize(
    ("compute", "parameters", "tokens"), [(6e23, 70.7e9, 1.41e12), (1e24, 91.3e9, 1.83e12), (5.88e23, 70e9, 1.4e12)]
)
def test_the_compute_optimum_has_known_sizes_and_takes_just_that_compute(compute, parameters, tokens):
    found = optimal_for(compute)
    assert found.parameters == pytest.approx(parameters, rel=0.003)
    assert found.tokens == pytest.approx(tokens, rel=0.004)
    assert 6 * found.parameters * found.tokens == pytest.approx(compute)


@given(st.floats(1e12, 1e28), st.floats(1.01, 1e4))
def test_more_compute_wants_both_larger_and_by_the_square_root(compute, factor):
    less, more = optimal_for(compute), optimal_for(factor * compute)
    assert more.parameters / less.parameters == pytest.approx(factor**0.5)
    assert more.tokens / less.tokens == pytest.approx(factor**0.5)


def test_small_models_were_not_fitted():
    assert not Optimal(parameters=1e6, tokens=2e7).was_fitted
    assert Optimal(parameters=1e9, tokens=2e10).was_fitted
