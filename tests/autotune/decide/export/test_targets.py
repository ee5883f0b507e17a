import pytest

from autotune.core.evidence import BaselineEvidence, RecipeRow
from autotune.core.export import RowsHold
from autotune.decide.export import Subject, export_to
from tests.autotune.profiles import example_profile
from trainer.config import (
    CheckpointSettings,
    DataSettings,
    EvaluationSettings,
    ModelSettings,
    ParallelSettings,
    dotted,
)

KNOWN = RowsHold(real_tokens=500.0, samples=2.0, source="told")


def _export(nodes=1, ranks=1, hold=KNOWN, evidence=None, **changes):
    profile = example_profile()
    if evidence is not None:
        profile = profile.model_copy(update={"evidence": profile.evidence.model_copy(update=evidence)})
    profile = profile.model_copy(update={"train": profile.train.model_copy(update=changes)})
    return export_to("hf-trainer", Subject(profile=profile, nodes=nodes, ranks_per_node=ranks, hold=hold))


def _told(export, setting):
    return next(one for one in export.settings if one.setting == setting)


VARIANTS = [
    {},
    {"layout": "packed"},
    {"layout": "bucketed", "checkpointing": "selective"},
    {"parallel": ParallelSettings(strategy="fsdp2", shard_ranks=2), "precision": "bf16", "device": "cuda"},
    {"parallel": ParallelSettings(strategy="zero1", gradient_dtype="bf16")},
]


@pytest.mark.parametrize("changes", VARIANTS)
def test_every_setting_of_a_profile_is_told_once(changes):
    told = [one.setting for one in _export(**changes).settings]
    assert len(told) == len(set(told))
    for key in dotted(example_profile().train.model_dump(mode="json")):
        assert key in told or key.partition(".")[0] in told, key


@pytest.mark.parametrize("changes", VARIANTS)
def test_no_argument_is_written_twice(changes):
    names = [one.argument for one in _export(**changes).settings if one.argument is not None]
    assert len(names) == len(set(names))


def test_whatever_differs_says_how():
    for changes in VARIANTS:
        for one in _export(nodes=2, **changes).settings:
            assert one.equivalence == "same" or one.remark, one.setting


def test_packing_has_no_equivalent_and_its_measured_worth_is_told():
    row = RecipeRow(
        name="default", differences=["layout: padded instead of packed"], real_tokens_per_s=[1.0, 1.0, 1.0],
        ratio_to_tuned=0.8, ratio_low=0.5, ratio_high=1.0, outcome="ran",
    )  # fmt: skip
    other = row.model_copy(
        update={"name": "paper-style", "differences": [*row.differences, "head: dense instead of x"]}
    )
    found = BaselineEvidence(rows=[other, row], local_ranks=1, window_s=1.0, windows=3, seconds=9.0)
    export = _export(layout="packed", evidence={"baseline": found})
    (figure,) = _told(export, "layout").worth
    assert (figure.value, figure.low, figure.high) == (1.25, 1.0, 2.0)
    (head,) = _told(export, "head").worth
    assert "paper-style recipe, which differs in layout, head" in head.name
    assert any("packed rows are not" in warning and "2.00 samples" in warning for warning in export.warnings)


def test_without_a_dataset_the_missing_samples_are_a_warning_and_no_figure_is_made_up():
    export = _export(layout="packed", hold=RowsHold(real_tokens=500.0, samples=None, source="the dataset is not here"))
    assert any("--data" in warning for warning in export.warnings)
    assert export.batch.exported_real_tokens_per_step is None


def test_fewer_loader_processes_than_one_fetch_nothing_ahead():
    assert "dataloader_prefetch_factor" not in _export(data=DataSettings(loader_workers=0)).arguments
    assert _export(data=DataSettings(loader_workers=3)).arguments["dataloader_prefetch_factor"] == 2


def test_a_save_interval_in_seconds_becomes_steps_by_the_measured_rate():
    saving = CheckpointSettings(interval_s=60.0)
    export = _export(checkpoint=saving, global_batch_rows=100)
    step_s = export.batch.real_tokens_per_step / (100 * 33.5 / 512)  # the sweep's 100 slots/s, 33.5 of 512 of them real
    assert export.arguments["save_steps"] == max(1, int(60 / step_s))
    assert _told(export, "checkpoint.interval_s").remark.startswith("steps of")
    assert _export(checkpoint=CheckpointSettings(enabled=False)).arguments["save_strategy"] == "no"


def test_where_nothing_was_measured_no_save_interval_is_made_up():
    export = _export(evidence={"probe": None, "workers": None})
    assert "save_steps" not in export.arguments
    saving = CheckpointSettings(interval_steps=70)
    assert _export(checkpoint=saving, evidence={"probe": None, "workers": None}).arguments["save_steps"] == 70


def test_evaluation_is_written_only_where_it_is_meant():
    assert "eval_steps" not in _export().arguments
    assert _export(evaluation=EvaluationSettings(interval_steps=50)).arguments["eval_steps"] == 50


def test_buckets_of_torchs_own_size_stay_unnamed():
    assert "ddp_bucket_cap_mb" not in _export().arguments
    assert _export(parallel=ParallelSettings(bucket_cap_mib=100)).arguments["ddp_bucket_cap_mb"] == 100


def test_zero1_says_what_the_whole_optimizer_costs():
    probe = example_profile().evidence.probe.model_copy(update={"parameters": 1000})
    export = _export(ranks=4, parallel=ParallelSettings(strategy="zero1"), evidence={"probe": probe})
    told = _told(export, "parallel.strategy")
    assert told.equivalence == "none"
    assert [figure.value for figure in told.worth] == [8 * 1000 * 0.75]


def test_sixteen_bit_gradients_have_no_equivalent_and_fsdp2_imposes_them_with_bf16():
    assert (
        _told(_export(parallel=ParallelSettings(gradient_dtype="bf16")), "parallel.gradient_dtype").equivalence
        == "none"
    )
    imposed = _export(parallel=ParallelSettings(strategy="fsdp2"), precision="bf16", device="cuda")
    assert "travel in bf16" in _told(imposed, "parallel.gradient_dtype").remark


def test_modernbert_has_a_masked_head_of_its_own():
    model = ModelSettings(name="m", config={"model_type": "modernbert"})
    assert _told(_export(model=model), "head").elsewhere == "sparse_prediction=True in CONFIG"
    assert _told(_export(), "head").equivalence == "none"
