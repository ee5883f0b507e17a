import pytest

from autotune.core.evidence import ExchangeRow, NetworkEvidence
from autotune.decide.explain import explanations, meaning_of, of_key
from autotune.errors import BadInput
from tests.autotune.profiles import example_profile
from trainer.config import TrainConfig


def _of(profile, key):
    (found,) = of_key(explanations(profile), key)
    return found


def _with(profile, **train):
    return profile.model_copy(update={"train": profile.train.model_copy(update=train)})


def _loader(profile, workers):
    return _with(profile, data=profile.train.data.model_copy(update={"loader_workers": workers}))


def test_every_setting_is_explained_once_and_the_models_config_is_one():
    keys = [one.key for one in explanations(example_profile())]
    assert len(keys) == len(set(keys))
    assert "model.config" in keys
    assert set(TrainConfig.model_fields) == {key.partition(".")[0] for key in keys}


def test_the_micro_batch_was_measured_and_others_rejected():
    found = _of(example_profile(), "micro_batch_rows")
    assert (found.origin, found.because) == ("measured", "because")
    assert found.evidence[0].value == 900.0
    assert found.evidence[0].n == 4
    assert found.rejected == ("1 row: 55.6% of the fastest, 2 rows", "3 rows: refused for want of memory")


def test_the_loader_workers_were_measured_with_an_interval():
    found = _of(example_profile(), "data.loader_workers")
    assert found.origin == "measured"
    assert (found.evidence[0].low, found.evidence[0].high, found.evidence[0].n) == (0.985, 0.995, 3)
    assert found.rejected == ("0 workers: 50.0% of the ceiling, too few", "0 is slow")


@pytest.mark.parametrize(
    ("profile", "key", "words"),
    [
        (_with(example_profile(), micro_batch_rows=1), "micro_batch_rows", "2 rows were measured"),
        (_loader(example_profile(), 0), "data.loader_workers", "1 was measured"),
        (_with(example_profile(), global_batch_rows=99), "global_batch_rows", "122 rows would hold"),
        (_with(example_profile(), max_steps=7), "max_steps", "the default is 1000"),
    ],
)
def test_what_no_figure_supports_was_changed(profile, key, words):
    found = _of(profile, key)
    assert found.origin == "changed"
    assert words in found.because


def test_the_global_batch_follows_from_the_constraint():
    assert _of(_with(example_profile(), global_batch_rows=122), "global_batch_rows").origin == "constraint"


def test_defaults_and_what_the_probe_was_asked_for_are_told_apart():
    profile = _with(example_profile(), attention_dropout=0.0)
    assert _of(profile, "attention_dropout").origin == "asked for"
    assert _of(profile, "max_steps").origin == "default"
    assert "all figures were measured with it" in _of(profile, "precision").because


def test_without_evidence_nothing_was_measured():
    profile = example_profile()
    bare = profile.model_copy(update={"evidence": type(profile.evidence)()})
    assert not [one for one in explanations(bare) if one.origin == "measured"]


def test_the_exchange_is_explained_by_the_ways_that_were_tried():
    rows = [
        ExchangeRow(strategy=strategy, gradient_dtype="fp32", bucket_cap_mib=25, micro_batches=2, rows=2, steps=6,
                    step_s=1.0, real_tokens_per_s=speed, outcome="ran")
        for strategy, speed in (("ddp", 100.0), ("zero1", 90.0))
    ]  # fmt: skip
    network = NetworkEvidence(
        nodes=2, ranks_per_node=1, backend="gloo", transport="tcp", links=[], products_flops_per_s=[1.0],
        exchanges=rows, choice="the default: nothing is proven to be faster", windows=3, seconds=9.0,
    )  # fmt: skip
    profile = example_profile()
    profile = profile.model_copy(update={"evidence": profile.evidence.model_copy(update={"network": network})})
    found = _of(profile, "parallel.strategy")
    assert (found.origin, found.because) == ("measured", network.choice)
    assert found.rejected == ("zero1, fp32, 25 MiB, 2 micro-batches: 90 real tokens/s, ran",)
    parallel = profile.train.parallel.model_copy(update={"bucket_cap_mib": 7})
    assert _of(_with(profile, parallel=parallel), "parallel.bucket_cap_mib").origin == "changed"


def test_a_group_and_the_prefix_of_the_table_are_keys_too():
    found = explanations(example_profile())
    assert of_key(found, "train.max_steps")[0].meaning == "Optimizer steps of the run."
    assert {one.key.partition(".")[0] for one in of_key(found, "data")} == {"data"}


def test_a_setting_means_what_the_schema_says_under_it_in_one_line():
    assert meaning_of("data.loader_workers") == "Loader processes per rank; 0 loads in the training process."
    assert meaning_of("model.config.rope.theta") is None
    meanings = [one.meaning for one in explanations(example_profile()) if one.meaning]
    assert len(meanings) > 50
    assert "\n" not in "".join(meanings)


@pytest.mark.parametrize(
    ("key", "nearest"), [("data.loader_workrs", "data.loader_workers"), ("loader_workers", "data.loader_workers")]
)
def test_an_unknown_key_suggests_the_nearest(key, nearest):
    with pytest.raises(BadInput) as refused:
        of_key(explanations(example_profile()), key)
    assert nearest in refused.value.next_step
