from autotune.core.evidence import ScalingRow
from autotune.show.charts import scaling_lines


def row(nodes, efficiency=1.0, measured=False, low=None, high=None):
    return ScalingRow(
        nodes=nodes, strategy="ddp", gradient_dtype="fp32", bucket_cap_mib=25, micro_batches=1, rows=1, step_s=1.0,
        real_tokens_per_s=100.0 * nodes * efficiency, efficiency=efficiency, efficiency_low=low, efficiency_high=high,
        limit="l", exposed_share=0.0, measured=measured,
    )  # fmt: skip


def test_predicted_measured_and_ideal_are_told_apart():
    lines = scaling_lines([("tiny", [row(1), row(2, 0.8, low=0.7, high=0.9), row(2, 0.75, measured=True)])]).lines
    predicted, ideal, measured = lines
    assert (predicted.kind, ideal.kind, measured.kind) == ("line", "dotted", "dots")
    assert (predicted.points[1].low, predicted.points[1].high) == (140.0, 180.0)
    assert [point.y for point in ideal.points] == [100.0, 200.0]
    assert [point.y for point in measured.points] == [150.0]
    assert len({line.colour for line in lines}) == 1


def test_several_models_have_several_colours():
    lines = scaling_lines([("tiny", [row(1)]), ("other", [row(1)])]).lines
    assert {line.colour for line in lines} == {0, 1}


def test_what_was_only_measured_is_drawn():
    assert [line.kind for line in scaling_lines([("tiny", [row(1, measured=True)])]).lines] == ["dots"]
