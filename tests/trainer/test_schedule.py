import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.trainer.oracles import config_of
from trainer.optimizer import learning_rate

SCHEDULES = ("constant", "linear", "cosine", "wsd")


@given(
    schedule=st.sampled_from(SCHEDULES),
    warmup=st.integers(0, 50),
    steps=st.integers(1, 200),
    final=st.floats(0, 1),
    share=st.floats(0.01, 1),
)
def test_the_learning_rate_rises_to_its_peak_and_falls_without_leaving_bounds(schedule, warmup, steps, final, share):
    config = config_of(
        schedule=schedule, warmup_steps=warmup, max_steps=steps, learning_rate=1.0, final_learning_rate_share=final,
        decay_share=share,
    )  # fmt: skip
    rates = [learning_rate(config, step) for step in range(steps)]
    assert all(0 < rate <= 1 + 1e-12 for rate in rates)
    up, down = rates[:warmup], rates[warmup:]
    assert up == sorted(up)
    assert down == sorted(down, reverse=True)
    assert warmup >= steps or max(rates) == pytest.approx(1.0)
    if schedule != "constant" and warmup < steps:
        assert learning_rate(config, steps) == pytest.approx(final)


def test_each_schedule_has_its_shape():
    def halfway(schedule: str, step: int) -> float:
        config = config_of(schedule=schedule, warmup_steps=0, max_steps=100, learning_rate=1.0, decay_share=0.2)
        return learning_rate(config, step)

    assert halfway("constant", 99) == 1
    assert halfway("linear", 25) == pytest.approx(0.75)
    assert halfway("cosine", 50) == pytest.approx(0.5)
    assert halfway("cosine", 25) == pytest.approx(0.853, abs=1e-3)
    assert halfway("wsd", 79) == 1
    assert halfway("wsd", 85) == pytest.approx(0.5)
