from hypothesis import given
from hypothesis import strategies as st

from trainer.batch import make_plan
from trainer.config import ModelSettings, TrainConfig, accumulation_steps


@given(rows=st.integers(1, 500), micro=st.integers(1, 64), world=st.integers(1, 9))
def test_the_global_batch_is_kept_and_no_micro_batch_exceeds_what_fits(rows, micro, world):
    config = TrainConfig(
        model=ModelSettings(name="m", config={"model_type": "bert"}), micro_batch_rows=micro, global_batch_rows=rows
    )
    steps = accumulation_steps(config, world)
    plan = make_plan(config, 1000, world)
    assert plan.rows_per_microbatch_per_rank <= micro
    assert plan.rows_per_microbatch_per_rank * steps * world >= rows
