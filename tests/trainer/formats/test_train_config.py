"""Settings that are derived or validated: the batch split, timeouts and intervals."""

import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.trainer.tiny_models import config_of
from trainer.data.batch_plan import make_plan
from trainer.formats.errors import BadConfig
from trainer.formats.tables import parse_table
from trainer.formats.train_config import (
    CheckpointSettings,
    ParallelSettings,
    gradient_accumulation_steps,
)

WEEK_S = 7 * 86400.0
"""Longest timeout."""


@given(
    global_batch_size=st.integers(1, 500),
    micro_batch_size=st.integers(1, 64),
    world_size=st.integers(1, 9),
)
def test_micro_batches_have_room_for_the_global_batch(
    global_batch_size, micro_batch_size, world_size
):
    config = config_of(
        micro_batch_size=micro_batch_size, global_batch_size=global_batch_size
    )
    plan = make_plan(config, samples=1000, world_size=world_size)
    micro_batches = gradient_accumulation_steps(config, world_size) * world_size
    # Micro-batches have room for the global batch; the last ones may be smaller.
    assert plan.sequences_per_micro_batch <= micro_batch_size
    assert plan.sequences_per_micro_batch * micro_batches >= global_batch_size


@pytest.mark.parametrize("timeout_s", [1.0, 600.0, WEEK_S])
def test_accepts_possible_timeout(timeout_s):
    settings = parse_table(ParallelSettings, {"timeout_s": timeout_s}, where="p.toml")
    assert settings.timeout_s == timeout_s


def test_accepts_short_checkpoint_interval():
    settings = parse_table(CheckpointSettings, {"interval_s": 1e-6}, where="p.toml")
    assert settings.interval_s == 1e-6


@pytest.mark.parametrize("timeout_s", [0.0, 0.9, WEEK_S + 1, math.inf, math.nan])
def test_rejects_impossible_timeout(timeout_s):
    with pytest.raises(BadConfig, match=f"timeout_s = {re.escape(str(timeout_s))}"):
        parse_table(ParallelSettings, {"timeout_s": timeout_s}, where="p.toml")


@pytest.mark.parametrize("interval_s", [0.0, -1.0, math.inf, math.nan])
def test_rejects_impossible_checkpoint_interval(interval_s):
    with pytest.raises(BadConfig, match=f"interval_s = {re.escape(str(interval_s))}"):
        parse_table(CheckpointSettings, {"interval_s": interval_s}, where="p.toml")
