from dataclasses import replace

import pytest

from autotune.errors import ProfileRejected, Undecided
from autotune.memory.values import CurvePoint
from autotune.network import scaling
from autotune.network.measure import measured_row
from autotune.network.values import Link
from autotune.profiles.decide.batch_split import split_global_batch
from testbed.examples.profiles import but, example_profile
from tests.autotune.network.gradient_syncs import (
    COMPUTE,
    CONFIG,
    LINK,
    Cluster,
    tuning_on,
)

CARD = scaling.Assumed(bits_per_s=25e9)
SHAPE = {
    "model_type": "bert",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 256,
}


def probed(**evidence_changes):
    """A profile with a curve whose rows cost 10 ms and whose micro-batches cost 2
    ms."""
    base = example_profile()
    curve = [
        CurvePoint(
            micro_batch_size=rows,
            padded_tokens_per_s=1.0,
            step_s=0.002 + 0.01 * rows,
            timed_steps=4,
        )
        for rows in (1, 8, 32)
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
    return scaling.known_of(profile, **{"assumed": CARD, "ranks_per_node": 2} | options)


def test_a_probe_and_an_assumed_card_are_enough_and_it_is_said_what_is_assumed():
    found = known(probed())
    assert [
        found.load.compute.sequence_s,
        found.load.compute.micro_batch_s,
    ] == pytest.approx([0.01, 0.002])
    assert found.load.global_batch_size == 1024
    assert (
        known(
            but(probed(), train={"global_batch_tokens": 51_200})
        ).load.global_batch_size
        == 512
    )
    assert found.network.between.bytes_per_s == pytest.approx(2.5e9)
    assert all("assumed" in source for source in found.sources)
    assert sum(part.elements for part in found.load.compute.gradients) == pytest.approx(
        500_000, rel=0.001
    )


def test_without_a_probe_nothing_is_predicted():
    with pytest.raises(ProfileRejected):
        known(probed(probe=None))


def test_the_prediction_names_useful_nodes_the_least_tokens_of_a_rank_and_steps_of_an_epoch():
    model = known(probed(), assumed=replace(CARD, bits_per_s=1e9))
    found = scaling.predict_scaling("tiny", model, [1, 2, 4, 8, 16], 10_240)
    assert [row.nodes for row in found.rows] == [1, 2, 4, 8, 16]
    assert found.rows[0].efficiency == pytest.approx(1.0)
    assert 1 <= found.useful_nodes <= 64
    assert (found.steps_per_epoch, found.global_batch_tokens) == (10.0, 100 * 1024)
    # Of what is assumed.
    assert (found.rows[0].efficiency_low, found.rows[0].efficiency_high) == (None, None)
    # 2·4 bytes of 500,000 gradients over 100 MB/s, at 2/3 of (2 ms + 32·10 ms) for
    # 3,200 tokens.
    most = model.load.max_micro_batch_size
    seconds_per_token = (
        2 / 3 * model.load.compute.forward_backward_s(most) / (most * 100)
    )
    assert found.least_tokens_per_rank == pytest.approx(
        2 * 4 * 500_000 / 1e8 / seconds_per_token, rel=0.001
    )


def test_measured_rows_stand_behind_the_predicted_ones_against_one_node_as_measured_or_else_as_predicted():
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
    predicted = scaling.predict_scaling("tiny", model, [2, 4])
    found = scaling.with_measured(predicted, {row.nodes: row for row in predicted.rows})
    assert [row.efficiency for row in found.rows[2:]] == pytest.approx(
        [row.efficiency for row in found.rows[:2]]
    )
    assert "as predicted" in found.sources[-1]


def test_a_step_of_many_micro_batches_is_measured_in_part_and_the_rest_is_added_as_predicted(
    tmp_path,
):
    model = known(probed(network=None), ranks_per_node=1, global_batch_tokens=6400)
    (row,) = scaling.predict_scaling("tiny", model, [2]).rows
    row = row.model_copy(
        update={"micro_batch_size": 4, "gradient_accumulation_steps": 8}
    )
    cluster = Cluster()
    found = measured_row(tuning_on(cluster, tmp_path), model, row, steps=3)
    (trial,) = cluster.trials
    assert trial.measured["config"]["global_batch_size"] == 4 * 4 * 2
    assert (found.measured, found.added_micro_batches) == (True, 4)
    four_s = 4 * model.load.compute.forward_backward_s(4)
    assert found.step_s == pytest.approx(
        cluster.run(trial).figures["step_s"][0] + four_s
    )
    assert found.tokens_per_s == pytest.approx(6400 / found.step_s)


def tuned(tmp_path, cluster=None, **changes):
    tuning = tuning_on(cluster or Cluster(), tmp_path, **changes)
    tuning.run()
    return tuning


def with_rows(global_batch_size, **changes):
    return CONFIG.model_copy(update={"global_batch_size": global_batch_size} | changes)


@pytest.fixture(scope="module")
def two_nodes(tmp_path_factory):
    return tuned(tmp_path_factory.mktemp("two"))


def test_links_and_computing_are_found_again_and_come_before_assumptions(two_nodes):
    between, compute = two_nodes.network().between, two_nodes.load().compute
    assert [between.bytes_per_s, between.latency_s] == pytest.approx(
        [LINK.bytes_per_s, LINK.latency_s], rel=1e-3
    )
    found = [compute.sequence_s, compute.micro_batch_s]
    assert found == pytest.approx([COMPUTE.sequence_s, COMPUTE.micro_batch_s], rel=1e-6)
    assert compute.gradients == COMPUTE.gradients
    found = known(
        probed(network=scaling.evidence(two_nodes)), assumed=None, ranks_per_node=None
    )
    assert found.network.between.bytes_per_s == pytest.approx(20e6, rel=1e-3)
    assert found.load.compute.sequence_s == pytest.approx(0.02)
    assert all("measured" in source for source in found.sources)


def test_sixteen_bits_are_chosen_if_the_network_limits_and_the_loss_is_equal_at_the_same_global_batch(
    two_nodes,
):
    chosen, gain = two_nodes.fastest()
    assert chosen.candidate.sync.gradient_dtype == "fp16"  # gloo's; NCCL has bf16
    assert gain.low > 1.2
    assert "0.00% apart, within 1%" in two_nodes.equal_loss
    for split in (one.candidate.split for one in two_nodes.tried):
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
)
def test_what_is_predicted_is_what_such_a_machine_takes(tmp_path, cluster):
    tuning = tuned(tmp_path, cluster)
    read = [one for one in tuning.tried if one.step_s is not None]
    assert [one.candidate.time.step_s for one in read] == pytest.approx(
        [one.step_s for one in read], rel=0.02
    )
    # Found again in default's steps.
    assert tuning.slowdown_share == pytest.approx(cluster.slowdown_share, abs=0.01)


@pytest.mark.parametrize(
    ("cluster", "said"),
    [
        ({"halved_loss": 1.05}, "5.00% apart, not within 1%"),
        ({"fall": 0.05}, "the loss went from 5.0000 to 4.9"),
    ],
)
def test_sixteen_bits_that_change_the_loss_or_a_loss_that_shows_nothing_keep_the_recipe(
    tmp_path, cluster, said
):
    measured = Cluster(**cluster)
    tuning = tuned(tmp_path, measured, config=with_rows(16, warmup_steps=10_000))
    assert said in tuning.equal_loss
    assert {one.candidate.sync.gradient_dtype for one in tuning.tried} == {"fp32"}
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
)
def test_every_strategy_is_shown_and_only_the_default_has_to_run(
    tmp_path, cluster, outcome
):
    rows = {
        row.strategy: row
        for row in scaling.evidence(tuned(tmp_path, Cluster(**cluster))).gradient_syncs
    }
    assert set(rows) == {"ddp", "zero1", "fsdp2"}
    assert (rows["fsdp2"].outcome, rows["fsdp2"].step_s) == (outcome, None)
    assert rows["zero1"].step_s > 0
    with pytest.raises(Undecided, match="it does not run here"):
        tuned(tmp_path / "default", Cluster(failing=("ddp",)))


def test_fewer_than_three_rounds_prove_nothing_and_it_is_said_and_a_repeated_tuning_measures_nothing_again(
    tmp_path,
):
    tuning, again = (
        tuned(tmp_path, Cluster(refusing=("fsdp2",)), budget_s=0.0),
        Cluster(refusing=("fsdp2",)),
    )
    assert tuning.fastest() == (tuning.tried[0], None)
    assert "only 1 of 3 rounds" in scaling.evidence(tuning).choice
    tuned(tmp_path, again, budget_s=0.0)
    assert [one.measured["config"]["parallel"]["strategy"] for one in again.trials] == [
        "fsdp2"
    ]


def test_a_round_that_was_cut_is_measured_again_whole(tmp_path, two_nodes, monkeypatch):
    cut, again = Cluster(), Cluster()
    # Of the second round.
    last = len(two_nodes.runner.finished) - len(two_nodes.tried) - 1
    monkeypatch.setattr(
        cut,
        "run",
        lambda trial: Cluster.run(cut, trial) if len(cut.trials) < last else 1 / 0,
    )
    with pytest.raises(ZeroDivisionError):
        tuned(tmp_path, cut)
    tuned(tmp_path, again)
    # What was cut off, alone, before the whole round.
    assert len(again.trials) == 1 + 2 * len(two_nodes.tried)


def test_places_that_a_dealing_leaves_empty_are_no_tokens(tmp_path):
    # 33 rows on 4 ranks: 9 micro-batches of one row have 36 places, 5 of two have 40.
    tuning = tuned(
        tmp_path,
        Cluster(nodes=4),
        config=with_rows(33, micro_batch_size=1),
        max_micro_batch_size=2,
    )
    read = [one for one in tuning.tried if one.figures]
    assert [one.rates()[0] for one in read] == pytest.approx(
        [33 * 100.0 / one.step_s for one in read]
    )


def test_the_probed_micro_batch_is_kept_unless_another_dealing_was_chosen(tmp_path):
    # 10 rows on 2 ranks, at most 4 in a micro-batch: two of 3. With up to 8 it would be
    # one of 5.
    tuning = tuned(tmp_path, config=with_rows(10))
    default = tuning.default()
    assert tuning.micro_batch_size(default) == 4
    other = replace(default, split=split_global_batch(10, 5, 2))
    # As large as gives the same, for other numbers of ranks.
    assert tuning.micro_batch_size(other) == 8


def test_a_fast_network_keeps_the_recipe_and_checks_no_loss(tmp_path):
    fast = Cluster(link=Link(latency_s=1e-6, bytes_per_s=1e10))
    tuning = tuned(tmp_path, fast, strategies=("ddp",), max_micro_batch_size=4)
    assert (tuning.equal_loss, tuning.fastest()) == (None, (tuning.tried[0], None))
    assert scaling.evidence(tuning).choice.startswith("the default")


def test_the_evidence_says_how_far_nodes_are_useful_and_a_step_of_many_micro_batches_is_measured_in_part(
    tmp_path,
):
    tuning = tuned(tmp_path, config=with_rows(160), max_micro_batch_size=4)
    default, found = tuning.tried[0], scaling.evidence(tuning)
    assert [
        one.gradient_accumulation_steps
        for one in (default.candidate.split, default.figures[0])
    ] == [20, 4]
    # 20 micro-batches of 4 rows, and an exchange that only the last of them hides.
    assert default.step_s == pytest.approx(default.candidate.time.step_s, rel=0.02)
    assert found.useful_nodes >= 1
    assert [(row.nodes, row.measured) for row in found.scaling][:2] == [
        (1, False),
        (2, False),
    ]
    assert all(row.efficiency_low <= row.efficiency + 1e-9 for row in found.scaling)
    assert any("global batch" in lever for lever in found.levers)
