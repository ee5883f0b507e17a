import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.core.interval import Interval
from autotune.decide.baseline import default_recipe, differences, is_precise, paper_style, ratio_to_tuned
from trainer.config import DataSettings, ModelSettings, ParallelSettings, TrainConfig

TUNED = TrainConfig(
    model=ModelSettings(name="m", config={"model_type": "bert"}),
    data=DataSettings(path="../data", dataset_hash="d", loader_workers=3, prefetch_batches=4),
    parallel=ParallelSettings(strategy="zero1", bucket_cap_mib=100, timeout_s=900.0),
    seq_length_tokens=128, layout="packed", micro_batch_rows=64, global_batch_rows=128, attention_dropout=0.0,
    compile_layers=True, precision="bf16", device="cuda", seed=7, learning_rate=3e-4, masking_probability=0.3,
)  # fmt: skip
rates = st.lists(st.floats(0.1, 1e6), min_size=1, max_size=12)


def by_default(tuned: TrainConfig = TUNED) -> TrainConfig:
    return default_recipe(tuned, 4096).config


def papers(tuned: TrainConfig = TUNED, workers: int = 12) -> TrainConfig:
    return paper_style(tuned, 4096, workers, "limit").config


@pytest.mark.parametrize("config", [by_default(), papers()])
def test_what_the_user_asked_for_stays(config):
    kept = ("model", "seq_length_tokens", "device", "seed", "learning_rate", "masking_probability")
    assert all(getattr(config, name) == getattr(TUNED, name) for name in kept)
    assert (config.data.path, config.data.dataset_hash) == ("../data", "d")
    assert (config.global_batch_tokens, config.global_batch_samples) == (4096, None)


def test_the_default_recipe_is_what_model_and_data_alone_give():
    plain = TrainConfig(
        model=TUNED.model, data=DataSettings(path="../data", dataset_hash="d"), seq_length_tokens=128, device="cuda",
        parallel=ParallelSettings(timeout_s=900.0), seed=7, learning_rate=3e-4, masking_probability=0.3,
        global_batch_rows=128, global_batch_tokens=4096,
    )  # fmt: skip
    assert by_default() == plain


def test_the_papers_style_is_fp32_without_tf32_on_padded_rows_with_a_head_over_all_places():
    config = papers()
    assert (config.precision, config.tf32, config.layout, config.head, config.last_layer) == (
        "fp32", False, "padded", "dense", "all",
    )  # fmt: skip
    assert (config.attention, config.attention_dropout, config.compile_layers) == ("auto", None, False)
    assert (config.micro_batch_rows, config.data.loader_workers) == (64, 8)
    assert config.parallel == ParallelSettings(gradient_as_bucket_view=False, timeout_s=900.0)


def test_both_are_valid_settings_of_the_trainer():
    for config in (by_default(), papers()):
        assert TrainConfig.model_validate(config.model_dump()) == config


def test_differences_name_the_key_theirs_and_ours():
    found = differences(default_recipe(TUNED, 4096), TUNED, local_ranks=2)
    assert "precision: fp32 instead of bf16" in found
    assert "compile_layers: false instead of true" in found
    assert "attention_dropout: unset instead of 0.0" in found
    assert "data.loader_workers: 0 instead of 3" in found
    assert "parallel.strategy: ddp instead of zero1" in found
    assert not any("global_batch" in one or "timeout" in one for one in found)


def test_one_rank_alone_exchanges_nothing_and_a_cpu_has_no_tf32():
    on_cpu = TUNED.model_copy(update={"device": "cpu", "precision": "fp32"})
    found = differences(paper_style(on_cpu, 4096, 8, "limit"), on_cpu, local_ranks=1)
    assert not any(one.startswith(("parallel.", "tf32", "precision")) for one in found)


def test_fewer_workers_than_the_papers_are_explained_even_where_they_are_as_tuned():
    assert not any("paper" in one for one in differences(paper_style(TUNED, 1, 8, "8 CPUs"), TUNED, 1))
    found = differences(paper_style(TUNED, 1, 3, "3 CPUs"), TUNED, 1)
    assert "data.loader_workers: 3 (the paper's 8 are too many here: 3 CPUs)" in found


def test_a_smaller_micro_batch_says_why():
    smaller = paper_style(TUNED, 1, 8, "limit").with_rows(32, "64 do not fit 1 GiB")
    assert "micro_batch_rows: 32 instead of 64 (64 do not fit 1 GiB)" in differences(smaller, TUNED, 1)


def test_the_tuned_settings_do_not_differ_from_themselves():
    assert differences(default_recipe(by_default(), 4096), by_default(), 2) == []


@given(rates, st.floats(0.01, 100))
def test_a_constant_ratio_is_found_whatever_drifts_between_rounds(tuned, factor):
    found = ratio_to_tuned([factor * rate for rate in tuned], tuned)
    assert found.value == pytest.approx(factor)
    assert (found.low is None) == (len(tuned) < 3)


def test_one_held_up_window_in_five_moves_nothing():
    tuned = [100.0, 101.0, 40.0, 99.0, 100.0]
    found = ratio_to_tuned([50.0] * 5, tuned)
    assert found.value == pytest.approx(0.5, rel=0.01)
    assert found.high / found.low < 1.1


@pytest.mark.parametrize(
    ("low", "high", "precise"), [(0.96, 1.04, True), (0.9, 1.1, False), (None, None, False), (0.93, 1.02, True)]
)
def test_a_ratio_is_precise_when_its_bounds_are_five_per_cent_away(low, high, precise):
    assert is_precise(Interval(value=1.0, low=low, high=high)) is precise


def test_no_rounds_have_no_ratio():
    with pytest.raises(ValueError, match="no figures"):
        ratio_to_tuned([], [])
    assert math.isclose(ratio_to_tuned([1.0], [2.0]).value, 0.5)
