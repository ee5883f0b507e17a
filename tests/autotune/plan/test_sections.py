import json
from dataclasses import replace

from autotune.base.answer_json import answer_json
from autotune.evidence.plan import Fleet, PlanFigure
from autotune.memory.values import Share
from autotune.plan.decide import Plan, plan_of
from autotune.plan.sections import WIDTH, plan_text
from tests.autotune.plan.test_decide import NOTHING_HELD, known, memory

SOURCE = (
    "a source that takes a good part of a line, with its date and whatever else has to"
    " be said of it"
)
WAYS = ("DDP", "ZeRO-1", "ZeRO-2", "ZeRO-3 (FSDP2)", "TP 2", "PP 2")


def figure(value, *, basis="assumed", confidence=None):
    return PlanFigure(
        value=value,
        low=0.9 * value,
        high=1.1 * value,
        confidence=confidence,
        basis=basis,
        source=SOURCE,
    )


def example(ranks=None, **changes) -> Plan:
    """Return a plan with every figure; ``ranks`` replaces those of all ranks."""
    shares = tuple(
        Share(
            name=name,
            total_bytes=10**10,
            held=NOTHING_HELD,
            fits=name != "DDP",
            trains_here=number < 2,
        )
        for number, name in enumerate(WAYS)
    )
    plan = plan_of(
        known(
            amount=45.2e9,
            total=figure(8e7),
            model="bert-120m",
            fleet=Fleet(
                device="cuda",
                name="NVIDIA H100 NVL",
                nodes=128,
                ranks_per_node=2,
                memory_bytes=94 * 10**9,
            ),
            rank_units_per_s=figure(4e5, basis="measured", confidence=0.95),
            price_per_device_hour=2.5,
            ranks={
                "efficiency": figure(0.8),
                "efficiency_by_nodes": {1: 1.0, 64: 0.9, 128: 0.8},
            },
            memory=replace(memory(), shares=shares),
            next_command="autotune probe --model bert-120m --data DIR",
        )
    )
    texts = {
        "wall_s": figure(500_000),
        "warnings": ("something of some length that wraps to a second line " * 3,) * 3,
        "all_ranks": replace(plan.all_ranks, **ranks or {}),
    }
    return replace(plan, **texts | changes)


def test_plan_fits_a_terminal():
    text = plan_text(example())
    lines = text.splitlines()
    assert len(lines) <= 45
    assert max(len(line) for line in lines) <= WIDTH
    assert lines[-1] == "next: autotune probe --model bert-120m --data DIR"
    table = text.split("tokens/s:")[0].splitlines()[2:]
    assert len(table) == 12
    assert all(
        line.split()[-1] in ("given", "measured", "predicted", "assumed")
        for line in table
    )


def test_names_interval_with_its_basis():
    text = plan_text(example())
    (rate,) = [line for line in text.splitlines() if "of one GPU" in line]
    assert "360,000 to 440,000 (95 %)" in rate
    assert rate.endswith("measured")
    assert "5.8 days  5.2 days to 6.4 days" in text
    assert "1 h 00 min  54 min 00 s to 1 h 06 min" in plan_text(
        example(wall_s=figure(3600))
    )


def test_missing_figures_show_as_missing():
    nothing = dict.fromkeys(
        (
            "passes",
            "rank_units_per_s",
            "wall_s",
            "device_hours",
            "cost",
            "flops_6n",
            "memory",
        )
    )
    reasons = {
        "memory_missing": "it could not be traced",
        "warnings": (),
        "by_nodes": (),
    }
    plan = example(ranks={"units_per_s": None, "efficiency": None}, **nothing | reasons)
    text = plan_text(plan)
    assert "Memory: n/a, it could not be traced" in text
    assert all(
        "n/a" in line
        for line in text.splitlines()
        if line.startswith(("wall time", "epochs", "GPU-hours"))
    )
    assert json.loads(answer_json(plan))["wall_s"] is None


def test_stars_strategies_outside_the_trainer():
    text = " ".join(plan_text(example()).split())
    assert "ZeRO-2 *" in text
    assert "(* formula)" in text


def test_model_name_cannot_steer_a_terminal():
    text = plan_text(
        example(model="\x1b[2Jm", warnings=("\x1b[31m",), next_command="a\nb")
    )
    assert "\x1b" not in text
    assert text.splitlines()[-1] == "next: a b"
