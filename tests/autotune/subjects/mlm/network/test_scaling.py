from dataclasses import replace

import pytest

from autotune.base.answer_json import jsonable
from autotune.errors import ProfileRejected, Undecided
from autotune.evidence.network import Link
from autotune.evidence.probe import CurvePoint
from autotune.network import scaling
from autotune.network.sections import scaling_text
from autotune.profiles.decide.batch_split import split_global_batch
from autotune.subjects.mlm.network.evidence import evidence as evidence_of
from autotune.subjects.mlm.network.measure import measured_row
from testbed.examples.profiles import but, example_profile
from tests.autotune.subjects.mlm.network.gradient_syncs import (
    COMPUTE,
    CONFIG,
    LINK,
    Cluster,
    tuning_on,
)

ASSUMED_NIC = scaling.Assumed(bits_per_s=25e9)
SHAPE = {
    "model_type": "bert",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 256,
}


def probed(**evidence_changes):
    """Return a profile whose sequences cost 10 ms and micro-batches 2 ms."""
    base = example_profile()
    curve = [
        CurvePoint(
            size=size,
            units_per_s=1.0,
            step_s=0.002 + 0.01 * size,
            timed_steps=4,
        )
        for size in (1, 8, 32)
    ]
    probe = base.evidence.probe.model_copy(
        update={
            "curve": curve,
            "feasible_max": 32,
            "parameters": 500_000,
            "mean_tokens_per_sequence": 100.0,
        }
    )
    return but(
        base,
        train={
            "model": base.train.model.model_copy(update={"config": SHAPE}),
            "global_batch_size": 1024,
        },
        constraints={"global_batch_tokens": 100 * 1024},
        evidence={"probe": probe, **evidence_changes},
    )


def known(profile, **options):
    return scaling.known_of(
        profile, **{"assumed": ASSUMED_NIC, "ranks_per_node": 2} | options
    )


def test_names_nodes_that_cannot_share_the_batch():
    profile = but(probed(), train={"global_batch_size": 32})
    model = known(profile, assumed=ASSUMED_NIC, ranks_per_node=8)
    prediction = scaling.predict_scaling("tiny", model, [1, 2, 128])
    assert [row.nodes for row in prediction.rows] == [1, 2]
    (skipped,) = jsonable(prediction)["skipped"]
    reason = "the global batch has 32 sequences, fewer than the 1,024 ranks"
    assert skipped == {"nodes": 128, "reason": reason}
    shown = " ".join(scaling_text(prediction).split())
    assert f"ot predicted on 128 nodes: {reason}" in shown


def test_assumed_nic_needs_only_a_probe():
    assumed = known(probed())
    assert [
        assumed.load.compute.sequence_s,
        assumed.load.compute.micro_batch_s,
    ] == pytest.approx([0.01, 0.002])
    assert assumed.load.global_batch_size == 1024
    assert (
        known(
            but(probed(), train={"global_batch_tokens": 51_200})
        ).load.global_batch_size
        == 512
    )
    assert assumed.network.between.bytes_per_s == pytest.approx(2.5e9)
    assert all("assumed" in source for source in assumed.sources)
    assert sum(
        part.elements for part in assumed.load.compute.gradients
    ) == pytest.approx(500_000, rel=0.001)


def test_predicts_nothing_without_a_probe():
    with pytest.raises(ProfileRejected):
        known(probed(probe=None))


def test_predicts_useful_nodes():
    model = known(probed(), assumed=replace(ASSUMED_NIC, bits_per_s=1e9))
    prediction = scaling.predict_scaling("tiny", model, [1, 2, 4, 8, 16], 10_240)
    assert [row.nodes for row in prediction.rows] == [1, 2, 4, 8, 16]
    assert prediction.rows[0].efficiency == pytest.approx(1.0)
    assert 1 <= prediction.useful_nodes <= 64
    assert (prediction.steps_per_epoch, prediction.global_batch_tokens) == (
        10.0,
        100 * 1024,
    )
    # Of what is assumed.
    assert (prediction.rows[0].efficiency_low, prediction.rows[0].efficiency_high) == (
        None,
        None,
    )


def test_predicts_least_tokens_of_a_rank():
    model = known(probed(), assumed=replace(ASSUMED_NIC, bits_per_s=1e9))
    prediction = scaling.predict_scaling("tiny", model, [1, 2, 4, 8, 16], 10_240)
    # 2·4 bytes of 500,000 gradients over 100 MB/s, at 2/3 of (2 ms + 32·10 ms) for
    # 3,200 tokens.
    micro_batch_size = model.load.max_micro_batch_size
    seconds_per_token = (
        2
        / 3
        * model.load.compute.forward_backward_s(micro_batch_size)
        / (micro_batch_size * 100)
    )
    assert prediction.least_tokens_per_rank == pytest.approx(
        2 * 4 * 500_000 / 1e8 / seconds_per_token, rel=0.001
    )


def test_measured_rows_follow_predicted_ones():
    model = known(probed())
    predicted = scaling.predict_scaling("tiny", model, [1, 2, 4])
    measured = {
        row.nodes: row.model_copy(update={"measured": True, "tokens_per_s": rate})
        for row, rate in zip(predicted.rows[:2], (500.0, 800.0), strict=True)
    }
    rows = scaling.with_measured(predicted, measured).rows
    assert [(row.nodes, row.measured) for row in rows] == [
        (1, False),
        (2, False),
        (4, False),
        (1, True),
        (2, True),
    ]
    assert rows[-1].efficiency == pytest.approx(0.8)


def test_efficiency_is_relative_to_predicted_one_node():
    model = known(probed())
    predicted = scaling.predict_scaling("tiny", model, [2, 4])
    combined = scaling.with_measured(
        predicted, {row.nodes: row for row in predicted.rows}
    )
    assert [row.efficiency for row in combined.rows[2:]] == pytest.approx(
        [row.efficiency for row in combined.rows[:2]]
    )
    assert "as predicted" in combined.sources[-1]


def test_measures_long_step_in_part(tmp_path):
    model = known(probed(network=None), ranks_per_node=1, global_batch_tokens=6400)
    (row,) = scaling.predict_scaling("tiny", model, [2]).rows
    row = row.model_copy(
        update={"micro_batch_size": 4, "gradient_accumulation_steps": 8}
    )
    cluster = Cluster()
    measured = measured_row(tuning_on(cluster, tmp_path), model, row, steps=3)
    (trial,) = cluster.trials
    assert trial.measured["config"]["global_batch_size"] == 4 * 4 * 2
    assert (measured.measured, measured.added_micro_batches) == (True, 4)
    four_s = 4 * model.load.compute.forward_backward_s(4)
    assert measured.step_s == pytest.approx(
        cluster.run(trial).figures["step_s"][0] + four_s
    )
    assert measured.tokens_per_s == pytest.approx(6400 / measured.step_s)


def tuned(tmp_path, cluster=None, **changes):
    tuning = tuning_on(cluster or Cluster(), tmp_path, **changes)
    tuning.run()
    return tuning


def with_global_batch(global_batch_size, **changes):
    return CONFIG.model_copy(update={"global_batch_size": global_batch_size} | changes)


@pytest.fixture(scope="module")
def two_nodes(tmp_path_factory):
    return tuned(tmp_path_factory.mktemp("two"))


def test_recovers_links_from_measurements(two_nodes):
    between = two_nodes.network().between
    compute = two_nodes.load().compute
    assert [between.bytes_per_s, between.latency_s] == pytest.approx(
        [LINK.bytes_per_s, LINK.latency_s], rel=1e-3
    )
    costs = [compute.sequence_s, compute.micro_batch_s]
    assert costs == pytest.approx([COMPUTE.sequence_s, COMPUTE.micro_batch_s], rel=1e-6)
    assert compute.gradients == COMPUTE.gradients


def test_measurements_take_precedence_over_assumptions(two_nodes):
    costs = known(
        probed(network=evidence_of(two_nodes)), assumed=None, ranks_per_node=None
    )
    assert costs.network.between.bytes_per_s == pytest.approx(20e6, rel=1e-3)
    assert costs.load.compute.sequence_s == pytest.approx(0.02)
    assert all("measured" in source for source in costs.sources)


def test_chooses_16_bits_if_loss_is_equal(two_nodes):
    chosen, gain = two_nodes.fastest()
    assert chosen.candidate.sync.gradient_dtype == "fp16"  # gloo's; NCCL has bf16
    assert gain.low > 1.2
    assert "0.00% apart, within 1%" in two_nodes.equal_loss
    for split in (measurement.candidate.split for measurement in two_nodes.tried):
        assert split.micro_batch_size <= 8
        assert (
            split.micro_batch_size * split.gradient_accumulation_steps * 2
            == CONFIG.global_batch_size
        )


@pytest.mark.parametrize(
    "cluster",
    [
        Cluster(nodes=4),
        Cluster(slowdown_share=0.3, link=Link(latency_s=1e-4, bytes_per_s=4e8)),
    ],
    ids=["four nodes", "slowed compute"],
)
def test_prediction_matches_measured_steps(tmp_path, cluster):
    tuning = tuned(tmp_path, cluster)
    measured = [
        measurement for measurement in tuning.tried if measurement.step_s is not None
    ]
    assert [
        measurement.candidate.time.step_s for measurement in measured
    ] == pytest.approx([measurement.step_s for measurement in measured], rel=0.02)
    # Recovered from the steps of the default.
    assert tuning.slowdown_share == pytest.approx(cluster.slowdown_share, abs=0.01)


@pytest.mark.parametrize(
    ("cluster", "reason"),
    [
        ({"halved_loss": 1.05}, "5.00% apart, not within 1%"),
        ({"fall": 0.05}, "the loss went from 5.0000 to 4.9"),
    ],
    ids=["another loss", "flat loss"],
)
def test_changed_loss_keeps_the_recipe(tmp_path, cluster, reason):
    measured = Cluster(**cluster)
    tuning = tuned(
        tmp_path, measured, config=with_global_batch(16, warmup_steps=10_000)
    )
    assert reason in tuning.equal_loss
    assert {
        measurement.candidate.sync.gradient_dtype for measurement in tuning.tried
    } == {"fp32"}
    checks = [
        trial.measured["config"]
        for trial in measured.trials
        if trial.measured.get("steps") == 48
    ]
    # The check does not wait for a long warm-up.
    assert {config["warmup_steps"] for config in checks} == {8}


@pytest.mark.parametrize(
    ("cluster", "outcome"),
    [
        ({"refusing": ("fsdp2",)}, "rejected: these two do not go together"),
        ({"failing": ("fsdp2",)}, "crashed"),
    ],
    ids=["rejected", "crashed"],
)
def test_shows_every_strategy(tmp_path, cluster, outcome):
    rows = {
        row.strategy: row
        for row in evidence_of(tuned(tmp_path, Cluster(**cluster))).gradient_syncs
    }
    assert set(rows) == {"ddp", "zero1", "fsdp2"}
    assert (rows["fsdp2"].outcome, rows["fsdp2"].step_s) == (outcome, None)
    assert rows["zero1"].step_s > 0


def test_default_strategy_has_to_run(tmp_path):
    with pytest.raises(Undecided, match="it does not run here"):
        tuned(tmp_path / "default", Cluster(failing=("ddp",)))


def test_one_round_proves_nothing(tmp_path):
    tuning = tuned(tmp_path, Cluster(refusing=("fsdp2",)), budget_s=0.0)
    repeated = Cluster(refusing=("fsdp2",))
    assert tuning.fastest() == (tuning.tried[0], None)
    assert "only 1 of 3 rounds" in evidence_of(tuning).choice
    tuned(tmp_path, repeated, budget_s=0.0)
    assert [
        trial.measured["config"]["parallel"]["strategy"] for trial in repeated.trials
    ] == ["fsdp2"]


def test_interrupted_round_is_measured_again(tmp_path, two_nodes, monkeypatch):
    interrupted = Cluster()
    resumed = Cluster()
    # Of the second round.
    last_trial = len(two_nodes.runner.finished) - len(two_nodes.tried) - 1
    monkeypatch.setattr(
        interrupted,
        "run",
        lambda trial: (
            Cluster.run(interrupted, trial)
            if len(interrupted.trials) < last_trial
            else 1 / 0
        ),
    )
    with pytest.raises(ZeroDivisionError):
        tuned(tmp_path, interrupted)
    tuned(tmp_path, resumed)
    # What was cut off, alone, before the whole round.
    assert len(resumed.trials) == 1 + 2 * len(two_nodes.tried)


def test_empty_sequences_are_no_tokens(tmp_path):
    # 33 sequences on 4 ranks: 9 micro-batches of one hold 36, and 5 of two hold 40.
    tuning = tuned(
        tmp_path,
        Cluster(nodes=4),
        config=with_global_batch(33, micro_batch_size=1),
        max_micro_batch_size=2,
    )
    measured = [measurement for measurement in tuning.tried if measurement.figures]
    assert [measurement.rates()[0] for measurement in measured] == pytest.approx(
        [33 * 100.0 / measurement.step_s for measurement in measured]
    )


def test_keeps_the_probed_micro_batch(tmp_path):
    # 10 sequences on 2 ranks, at most 4 in a micro-batch: two of 3. With up to 8 it
    # would be one of 5.
    tuning = tuned(tmp_path, config=with_global_batch(10))
    default = tuning.default()
    assert tuning.micro_batch_size(default) == 4
    other_split = replace(default, split=split_global_batch(10, 5, 2))
    # As large as gives the same, for other numbers of ranks.
    assert tuning.micro_batch_size(other_split) == 8


def test_fast_network_keeps_the_recipe(tmp_path):
    fast = Cluster(link=Link(latency_s=1e-6, bytes_per_s=1e10))
    tuning = tuned(tmp_path, fast, strategies=("ddp",), max_micro_batch_size=4)
    assert (tuning.equal_loss, tuning.fastest()) == (None, (tuning.tried[0], None))
    assert evidence_of(tuning).choice.startswith("the default")


def test_evidence_names_useful_nodes(tmp_path):
    tuning = tuned(tmp_path, config=with_global_batch(160), max_micro_batch_size=4)
    default = tuning.tried[0]
    evidence = evidence_of(tuning)
    assert [
        batch.gradient_accumulation_steps
        for batch in (default.candidate.split, default.figures[0])
    ] == [20, 4]
    # 20 micro-batches of 4; only the last one hides gradient synchronisation.
    assert default.step_s == pytest.approx(default.candidate.time.step_s, rel=0.02)
    assert evidence.useful_nodes >= 1
    assert [(row.nodes, row.measured) for row in evidence.scaling][:2] == [
        (1, False),
        (2, False),
    ]
    assert all(row.efficiency_low <= row.efficiency + 1e-9 for row in evidence.scaling)
    assert any("global batch" in lever for lever in evidence.levers)
