from pathlib import Path

import pytest

from autotune.errors import BadInput
from autotune.evidence.plan import Goal
from autotune.evidence.profile import Profile
from autotune.network.scaling import Assumed
from autotune.plan.inputs import plan
from autotune.plan.request import PlanRequest
from autotune.profiles.store import StoredProfile
from autotune.subjects.mlm.memory import plan_memory
from autotune.subjects.mlm.memory.prediction import settings_of_step
from autotune.subjects.mlm.network.evidence import evidence
from testbed.datasets import write_dataset
from testbed.examples.profiles import but
from tests.autotune.plan.plans import on_gpus, traced, without_evidence
from tests.autotune.subjects.mlm.network.gradient_syncs import Cluster, tuning_on
from trainer.formats import gpu_peaks
from trainer.formats.presets import model_settings
from trainer.formats.train_config import TrainConfig

TOKENS = Goal(kind="units", amount=1e9, source="--tokens 1B")


def answer(source, **changes):
    if isinstance(source, Profile):
        source = StoredProfile(
            path=Path("profiles/p.toml"), profile=source, intact=True
        )
    return plan(
        PlanRequest(
            **{"source": source, "model_argument": "", "goal": TOKENS} | changes
        ),
        lambda *_: None,
    )


def shape(name="bert-mini") -> TrainConfig:
    settings = {
        "layout": None,
        "precision": None,
        "seq_length_tokens": 512,
        "compile": False,
    }
    return settings_of_step(model_settings(name), "cuda", **settings)


@pytest.fixture
def no_trace(monkeypatch):
    def refuse():
        raise AssertionError("traced")

    monkeypatch.setattr(plan_memory, "ForkServerMachine", refuse)


@pytest.fixture(scope="module")
def network(tmp_path_factory):
    tuning = tuning_on(Cluster(), tmp_path_factory.mktemp("network"))
    tuning.run()
    return evidence(tuning)


def test_measured_profile_gives_measured_rate(no_trace):
    planned = answer(traced())
    # The worker sweep's windows of 99 to 101 tokens/s include padding: 100 of 512
    # positions hold tokens.
    rate = planned.rank_units_per_s
    assert (rate.value, rate.basis) == (
        pytest.approx(100 * 100 / 512, rel=1e-3),
        "measured",
    )
    assert rate.low < rate.value < rate.high
    assert (planned.wall_s.basis, planned.batch_units.value) == ("predicted", 102_400)
    # 8 MB of state; the rest of the measured peak of 1 GB is that of 32 sequences.
    assert planned.memory.micro_batch_size == 2
    expected_bytes = 8_000_000 + (1_000_000_000 - 8_000_000) * 2 // 32
    assert planned.memory.shares[0].total_bytes == expected_bytes
    # Two CPUs of one rank.
    assert planned.device_hours.value == pytest.approx(planned.wall_s.value / 3600 * 2)


def test_goal_defaults_to_the_profiles_steps(no_trace):
    steps = answer(traced(), goal=None)  # the profile's
    assert (steps.steps.value, steps.goal.source) == (
        1000,
        "the profile's max_steps, 1,000",
    )


def test_divides_measured_rate_by_its_ranks(no_trace):
    rate = answer(traced()).rank_units_per_s
    workers = traced().evidence.workers.model_copy(update={"local_ranks": 4})
    # All of them reached it together.
    shared = answer(traced(workers=workers)).rank_units_per_s
    assert [shared.low, shared.value, shared.high] == pytest.approx(
        [rate.low / 4, rate.value / 4, rate.high / 4]
    )


def test_verified_memory_fits_whatever_is_predicted(no_trace):
    # What a trial showed to fit fits, whatever is predicted.
    proven = answer(but(traced(), constraints={"memory_budget_bytes": 10**7}))
    assert proven.memory.shares[0].total_bytes > proven.fleet.memory_bytes
    assert proven.memory.shares[0].fits
    assert not any("fit" in warning for warning in proven.warnings)


def test_measured_links_predict_more_nodes(no_trace, network):
    measured = traced(network=network.model_copy(update={"scaling": []}))
    ranks = answer(measured, nodes=8, ranks_per_node=2).all_ranks
    assert ranks.efficiency.basis == "predicted"
    assert "measured" in ranks.efficiency.source
    alone = answer(measured).rank_units_per_s.value
    assert ranks.units_per_s.value == pytest.approx(16 * alone * ranks.efficiency.value)


def test_names_assumed_links(no_trace, network):
    measured = traced(network=network.model_copy(update={"scaling": []}))
    assumed = answer(
        measured, nodes=8, ranks_per_node=2, links=Assumed(bits_per_s=25e9)
    ).all_ranks.efficiency
    assert assumed.basis == "assumed"
    assert "assumed NIC of 25 Gbit/s" in assumed.source
    assert (
        "assumed NIC of 100 Gbit/s"
        in answer(traced(), nodes=8).all_ranks.efficiency.source
    )


def test_measured_nodes_take_precedence_over_predictions(no_trace, network):
    row = network.scaling[-1].model_copy(
        update={"measured": True, "tokens_per_s": 1234.0, "efficiency": 0.5}
    )
    profile = traced(
        network=network.model_copy(update={"scaling": [*network.scaling, row]})
    )
    fleet = {"nodes": row.nodes, "ranks_per_node": network.ranks_per_node}
    ranks = answer(profile, **fleet).all_ranks
    assert ranks.units_per_s.value == 1234.0
    assert ranks.units_per_s.basis == ranks.efficiency.basis == "measured"
    assert (
        answer(profile, **fleet, global_batch_tokens=1e6).all_ranks.efficiency.basis
        == "predicted"
    )


@pytest.mark.system
def test_measured_rate_does_not_hold_elsewhere(warm_server):
    planned = answer(traced(), gpu="h200")
    assert planned.rank_units_per_s.basis == "predicted"
    assert "MFU" in planned.rank_units_per_s.source
    assert planned.fleet.name == "NVIDIA H200"
    assert any("not used for NVIDIA H200" in warning for warning in planned.warnings)


def test_predicts_rate_without_evidence(warm_server):
    planned = answer(without_evidence(on_gpus(traced())), nodes=2)
    assert planned.rank_units_per_s.basis == "predicted"
    assert planned.wall_s.low < planned.wall_s.value < planned.wall_s.high
    assert planned.fleet.ranks == 4  # as many as its nodes have
    assert planned.next_command.startswith("autotune probe --model tiny")


def test_plan_on_cpu_needs_a_rate(warm_server):
    on_a_cpu = without_evidence(traced())
    planned = answer(on_a_cpu)
    planned_from_rate = answer(on_a_cpu, units_per_s=1000.0)
    assert planned.wall_s is None
    assert any("--units-per-s" in warning for warning in planned.warnings)
    assert (
        planned_from_rate.wall_s.value,
        planned_from_rate.rank_units_per_s.basis,
    ) == (
        pytest.approx(1e6),
        "given",
    )


@pytest.mark.system
def test_duration_requires_a_known_peak(warm_server, monkeypatch):
    monkeypatch.setattr(
        gpu_peaks,
        "PEAKS",
        tuple(peak for peak in gpu_peaks.PEAKS if peak.name != "RTX 4090"),
    )
    hours = Goal(kind="hours", amount=2.0, source="--duration 2h")
    with pytest.raises(BadInput, match="RTX 4090 are unknown"):
        answer(shape(), gpu="rtx-4090-24gb", goal=hours)
    assert answer(
        shape(), gpu="rtx-4090-24gb", goal=hours, units_per_s=1e5
    ).units.value == pytest.approx(7.2e8)


@pytest.mark.system
def test_model_too_large_for_one_gpu_is_sharded(warm_server):
    model = shape("bert-350m").model
    config = model.config | {
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "intermediate_size": 16384,
    }
    large = shape().model_copy(
        update={"model": model.model_copy(update={"config": config})}
    )
    planned = answer(
        large, gpu="a100-40gb", nodes=2, ranks_per_node=8, global_batch_tokens=1e6
    )
    fits = {row.name: row.fits for row in planned.memory.shares}
    assert (
        fits["DDP"],
        fits["ZeRO-3 (FSDP2)"],
        planned.memory.max_micro_batch_size,
    ) == (
        False,
        True,
        0,
    )
    assert any("does not fit one GPU" in warning for warning in planned.warnings)
    assert planned.next_command.startswith("autotune estimate")
    assert planned.wall_s is not None


def test_too_few_sequences_enlarge_the_batch(warm_server):
    planned = answer(shape(), gpu="h200", nodes=256, ranks_per_node=8)
    assert any("too small for 2,048 ranks" in warning for warning in planned.warnings)
    assert planned.batch_units.value == pytest.approx(2048 * 512, rel=0.01)


@pytest.mark.system
def test_untraceable_architecture_keeps_the_plan(warm_server, tmp_path):
    config = tmp_path / "longformer.json"
    config.write_text(
        '{"model_type": "longformer", "num_hidden_layers": 2, "hidden_size": 64,'
        '"num_attention_heads": 2, "intermediate_size": 128, "attention_window": 32}'
    )
    planned = answer(shape(str(config)), gpu="h200", units_per_s=1e5)
    assert planned.memory is None
    assert "cannot be predicted" in planned.memory_missing
    assert planned.wall_s.value == pytest.approx(1e4)


@pytest.mark.system
def test_dataset_gives_tokens_of_an_epoch(warm_server, tmp_path):
    samples = [[7] * length for length in (10, 100, 300, 600) for _ in range(300)]
    data = write_dataset(tmp_path / "data", samples, vocab_size=300)
    epochs = Goal(kind="epochs", amount=2.0, source="--epochs 2")
    planned = answer(shape(), gpu="h200", goal=epochs, data=data)
    cut = 300 * (12 + 102 + 302 + 512)
    assert (planned.passes.value, planned.units.value) == (
        2,
        pytest.approx(2 * cut, rel=0.02),
    )
    assert (planned.memory.parameters.basis, planned.batch_units.basis) == (
        "predicted",
        "predicted",
    )


def test_short_documents_keep_their_length(warm_server, tmp_path):
    epochs = Goal(kind="epochs", amount=2.0, source="--epochs 2")
    short = write_dataset(
        tmp_path / "short", [[7] * 50 for _ in range(100)], vocab_size=300
    )
    assert answer(
        shape(), gpu="h200", goal=epochs, data=short
    ).units.value == 2 * 100 * (50 + 2)


def under(profile, strategy):
    return but(
        profile,
        train={
            "parallel": profile.train.parallel.model_copy(update={"strategy": strategy})
        },
    )


def test_state_is_divided_once_for_every_strategy(warm_server):
    profile = without_evidence(on_gpus(traced()))
    plans = [
        answer(under(profile, strategy), nodes=2).memory.shares
        for strategy in ("ddp", "zero1", "fsdp2")
    ]
    assert plans[0] == plans[1] == plans[2]
    assert plans[0][1].held.state_bytes < plans[0][0].held.state_bytes


def test_state_probed_under_another_strategy_stays_separate(warm_server):
    # Terms that were probed under another strategy are kept apart.
    profile = on_gpus(traced())
    profile = but(
        profile,
        evidence={
            "probe": profile.evidence.probe.model_copy(update={"local_ranks": 2})
        },
    )
    probed, shared = (
        answer(under(profile, strategy)).memory.shares[0].held.state_bytes
        for strategy in ("ddp", "fsdp2")
    )
    assert probed == 8_000_000 != shared
