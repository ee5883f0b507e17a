from pathlib import Path

from autotune.show.estimated import EstimatedProfile, batch_words, estimated_for, estimated_text, not_probed
from tests.autotune.profiles import ESTIMATE, estimated_profile


def at(path, previous=None, **train):
    profile = estimated_profile()
    profile = profile.model_copy(update={"train": profile.train.model_copy(update=train)})
    return EstimatedProfile(path=Path(path), profile=profile, previous=previous and Path(previous))


def test_each_profile_says_what_it_decides_how_the_batch_is_dealt_and_that_nothing_was_measured():
    text = estimated_text([at("a.toml"), at("b.toml", previous="b.previous.toml", micro_batch_rows=100)])
    assert "bert-120m: micro-batch 403 rows, not probed: said by the estimate" in text
    assert "a global batch of 256 rows is 1 micro-batch of 128 rows on each of 2 ranks" in text
    assert "is 2 micro-batches of 64 rows on each of 2 ranks" in text
    assert "profile: a.toml (nothing in it was measured)" in text
    assert "profile: b.toml (nothing in it was measured; the old one: b.previous.toml)" in text


def test_how_far_the_batch_is_known_is_said():
    assert "assumed for want of a dataset" in batch_words(estimated_profile(), ESTIMATE)
    looked_at = ESTIMATE.model_copy(update={"rows_assumed": False})
    assert batch_words(estimated_profile(), looked_at) == "about 130,679 real tokens, 510.5 in a row of the dataset"
    in_tokens = at("p", global_batch_tokens=130_679).profile
    assert "rows of the dataset decide" in batch_words(in_tokens, ESTIMATE)


def test_a_machine_without_a_name_is_a_gpu_or_a_cpu():
    profile = estimated_profile()
    for device, name in (("cuda", "a GPU"), ("cpu", "a CPU")):
        there = profile.fingerprint.model_copy(update={"gpu_name": None, "device": device})
        unnamed = profile.model_copy(update={"fingerprint": there})
        assert estimated_for(unnamed) == name
        assert f"predicted for {name} and was never tried" in not_probed(unnamed)


def test_the_name_of_a_strangers_card_steers_no_terminal():
    profile = estimated_profile()
    there = profile.fingerprint.model_copy(update={"gpu_name": "H100\x1b[31m"})
    assert not_probed(profile.model_copy(update={"fingerprint": there})).isprintable()
