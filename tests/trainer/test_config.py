import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.batch import make_plan
from trainer.config import CheckpointSettings, ModelSettings, ParallelSettings, TrainConfig, accumulation_steps
from trainer.errors import BadConfig
from trainer.schema import parse_table


@given(rows=st.integers(1, 500), micro=st.integers(1, 64), world=st.integers(1, 9))
def test_the_global_batch_is_kept_and_no_micro_batch_exceeds_what_fits(rows, micro, world):
    config = TrainConfig(
        model=ModelSettings(name="m", config={"model_type": "bert"}), micro_batch_rows=micro, global_batch_rows=rows
    )
    steps = accumulation_steps(config, world)
    plan = make_plan(config, 1000, world)
    assert plan.rows_per_microbatch_per_rank <= micro
    assert plan.rows_per_microbatch_per_rank * steps * world >= rows


@pytest.mark.parametrize(
    ("kind", "key", "value"),
    [(ParallelSettings, "timeout_s", value) for value in (0.0, 0.9, math.inf, math.nan, 1e10)]
    + [(CheckpointSettings, "interval_s", value) for value in (0.0, -1.0, math.inf, math.nan)],
)
def test_times_that_no_clock_can_wait_for_are_refused_with_their_key(kind, key, value):
    with pytest.raises(BadConfig) as caught:
        parse_table(kind, {key: value}, where="p.toml")
    assert f"{key} = {value}" in caught.value.message


def test_times_up_to_a_week_can_be_waited_for():
    for timeout_s in (1.0, 600.0, 7 * 86400.0):
        assert ParallelSettings(timeout_s=timeout_s).timeout_s == timeout_s
    assert CheckpointSettings(interval_s=1e-6).interval_s == 1e-6
