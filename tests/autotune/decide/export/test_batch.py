from hypothesis import given
from hypothesis import strategies as st

from autotune.core.export import RowsHold
from autotune.decide.export.batch import exported_batch
from tests.autotune.profiles import example_profile


def _profile(**changes):
    profile = example_profile()
    return profile.model_copy(update={"train": profile.train.model_copy(update=changes)})


def _hold(real_tokens, samples):
    return RowsHold(real_tokens=real_tokens, samples=samples, source="told")


def test_packed_rows_become_as_many_samples_as_hold_the_same_tokens():
    profile = _profile(layout="packed", micro_batch_rows=8, global_batch_rows=32, seq_length_tokens=512)
    batch = exported_batch(profile, _hold(510.0, 2.5), ranks=2)
    assert (batch.samples_per_microbatch_per_rank, batch.accumulation_steps) == (8, 5)
    assert batch.exported_samples_per_step == 80
    assert batch.real_tokens_per_step == 32 * 510
    assert batch.exported_real_tokens_per_step == 80 * 510 / 2.5
    assert batch.exported_fill_share == 510 / 2.5 / 512


def test_without_a_dataset_a_packed_row_counts_as_one_sample_and_the_tokens_are_not_told():
    batch = exported_batch(_profile(layout="packed", micro_batch_rows=4, global_batch_rows=16), _hold(500.0, None), 1)
    assert (batch.exported_samples_per_step, batch.accumulation_steps) == (16, 4)
    assert batch.exported_real_tokens_per_step is None
    assert batch.samples_per_row is None


def test_a_batch_in_real_tokens_decides():
    profile = _profile(layout="packed", global_batch_tokens=10_000, global_batch_rows=1)
    assert exported_batch(profile, _hold(500.0, 2.0), 1).rows_per_step == 20


@given(rows=st.integers(1, 5000), micro=st.integers(1, 300), ranks=st.integers(1, 64), samples=st.floats(1.0, 30.0))
def test_no_micro_batch_is_larger_than_what_fits_and_the_step_is_as_near_as_whole_ones_allow(
    rows, micro, ranks, samples
):
    profile = _profile(layout="packed", micro_batch_rows=micro, global_batch_rows=rows)
    batch = exported_batch(profile, _hold(100.0, samples), ranks)
    each, steps = batch.samples_per_microbatch_per_rank, batch.accumulation_steps
    assert 1 <= each <= micro
    assert batch.exported_samples_per_step == each * steps * ranks
    meant = max(1, round(rows * samples))
    assert abs(batch.exported_samples_per_step - meant) <= max(steps * ranks / 2, steps * ranks - meant)
