from dataclasses import replace

import pytest

from autotune.core.evidence import CurvePoint
from autotune.errors import ProfileRefused
from autotune.search.scaling import Assumed, evidence, known_of, measured_row, predict_scaling, with_measured
from tests.autotune.profiles import but, example_profile
from tests.autotune.search.exchanges import Cluster, tuning_on

CARD = Assumed(bits_per_s=25e9)
SHAPE = {"model_type": "bert", "num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 256}


def probed(**evidence_changes):
    """A profile with a curve whose rows cost 10 ms and whose micro-batches cost 2 ms."""
    base = example_profile()
    curve = [
        CurvePoint(rows=rows, slot_tokens_per_s=1.0, step_s=0.002 + 0.01 * rows, timed_steps=4) for rows in (1, 8, 32)
    ]
    probe = base.evidence.probe.model_copy(
        update={"curve": curve, "feasible_max": 32, "parameters": 500_000, "mean_real_tokens_per_row": 100.0}
    )
    return but(
        base,
        train={"model": base.train.model.model_copy(update={"config": SHAPE}), "global_batch_rows": 1024},
        constraints={"global_batch_tokens": 100 * 1024},
        evidence={"probe": probe, **evidence_changes},
    )


def known(profile, **options):
    return known_of(profile, **{"assumed": CARD, "ranks_per_node": 2} | options)


def scaled(counts, rows_per_epoch=None, **options):
    return predict_scaling("tiny", known(probed(), **options), counts, rows_per_epoch)


def test_a_probe_and_an_assumed_card_are_enough_and_it_is_said_what_is_assumed():
    found = known(probed())
    compute, parts = found.load.compute, found.load.compute.gradients
    assert [compute.row_s, compute.micro_batch_s] == pytest.approx([0.01, 0.002])
    assert found.load.global_batch_rows == 1024
    assert known(but(probed(), train={"global_batch_tokens": 51_200})).load.global_batch_rows == 512
    assert found.network.between.bytes_per_s == pytest.approx(2.5e9)
    assert all("assumed" in source for source in found.sources)
    # Gradients by shape add up to the model, and embeddings come last.
    assert sum(part.elements for part in parts) == pytest.approx(500_000, rel=0.001)
    assert (parts[-1].ready_share, parts[-1].elements) == (1.0, 500_000 - 2 * (4 * 64**2 + 2 * 64 * 256))


def test_measured_links_and_computing_come_before_assumptions(tmp_path):
    tuning = tuning_on(Cluster(), tmp_path)
    tuning.run()
    found = known(probed(network=evidence(tuning)), assumed=None, ranks_per_node=None)
    assert found.network.between.bytes_per_s == pytest.approx(20e6, rel=1e-3)
    assert found.load.compute.row_s == pytest.approx(0.02)
    assert all("measured" in source for source in found.sources)


def test_without_a_probe_nothing_is_predicted():
    with pytest.raises(ProfileRefused):
        known(probed(probe=None))


def test_the_prediction_names_useful_nodes_the_least_tokens_of_a_rank_and_steps_of_an_epoch():
    found = scaled([1, 2, 4, 8, 16], 10_240, assumed=replace(CARD, bits_per_s=1e9))
    assert [row.nodes for row in found.rows] == [1, 2, 4, 8, 16]
    assert found.rows[0].efficiency == pytest.approx(1.0)
    assert 1 <= found.useful_nodes <= 64
    assert (found.steps_per_epoch, found.global_batch_tokens) == (10.0, 100 * 1024)
    assert (found.rows[0].efficiency_low, found.rows[0].efficiency_high) == (None, None)  # of what is assumed
    # 2·4 bytes of 500,000 gradients over 100 MB/s, at 2/3 of (2 ms + 32·10 ms) for 3,200 tokens.
    load = known(probed()).load
    seconds_per_token = 2 / 3 * load.compute.forward_backward_s(load.most_rows) / (load.most_rows * 100)
    assert found.least_tokens_per_rank == pytest.approx(2 * 4 * 500_000 / 1e8 / seconds_per_token, rel=0.001)


def test_measured_rows_stand_behind_the_predicted_ones_against_one_node_as_measured_or_else_as_predicted():
    predicted = scaled([1, 2, 4])
    measured = {
        row.nodes: row.model_copy(update={"measured": True, "real_tokens_per_s": rate})
        for row, rate in zip(predicted.rows[:2], (500.0, 800.0), strict=True)
    }
    rows = with_measured(predicted, measured).rows
    assert [(row.nodes, row.measured) for row in rows] == [(1, False), (2, False), (4, False), (1, True), (2, True)]
    assert rows[-1].efficiency == pytest.approx(0.8)
    predicted = scaled([2, 4])
    found = with_measured(predicted, {row.nodes: row for row in predicted.rows})
    assert [row.efficiency for row in found.rows[2:]] == pytest.approx([row.efficiency for row in found.rows[:2]])
    assert "as predicted" in found.sources[-1]


def test_a_step_of_many_micro_batches_is_measured_in_part_and_the_rest_is_added_as_predicted(tmp_path):
    model = known(probed(network=None), ranks_per_node=1, global_batch_tokens=6400)
    row = predict_scaling("tiny", model, [2]).rows[0].model_copy(update={"rows": 4, "micro_batches": 8})
    cluster = Cluster()
    found = measured_row(tuning_on(cluster, tmp_path), model, row, steps=3)
    (trial,) = cluster.trials
    assert trial.measured["config"]["global_batch_rows"] == 4 * 4 * 2
    assert (found.measured, found.added_micro_batches) == (True, 4)
    four_s = 4 * model.load.compute.forward_backward_s(4)
    assert found.step_s == pytest.approx(cluster.run(trial).figures["step_s"][0] + four_s)
    assert found.real_tokens_per_s == pytest.approx(6400 / found.step_s)
