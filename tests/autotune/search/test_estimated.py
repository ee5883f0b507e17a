from dataclasses import replace

import pytest

from autotune.core.cards import find_card
from autotune.core.profile import profile_to_toml
from autotune.decide.memory import Ledger
from autotune.decide.surroundings import expected_on_cpu, expected_on_gpu
from autotune.errors import BadInput, ProfileRefused, UsageError
from autotune.search.estimated import ProfilesAsked, estimated_profile, profile_places, write_profiles
from autotune.search.prediction import Asked, Choices, Target, config_of, contents, find_target
from autotune.search.profiles import read_profile
from autotune.show.estimate import Answer, Predicted
from tests.autotune.profiles import example_profile
from trainer.dataset import read_manifest
from trainer.presets import model_settings

H100 = find_card("h100-nvl-94gb")
TARGET = Target(name=H100.name, budget_bytes=93 * 2**30, expected=expected_on_gpu((9, 0), 1), card=H100)
ASKED = Asked(
    models=(model_settings("bert-120m"),), gpu="h100-nvl-94gb", memory=None, device="cuda", data=None,
    vocab_size=30_522, seq_length_tokens=512, ranks=1, accumulate=True, tensor_ranks=1, pipeline_stages=1,
    max_rows=16_384,
)  # fmt: skip
CHOICES = Choices(
    layout=None, precision="bf16", attention="auto", attention_dropout=None, checkpointing="none", head="masked"
)


def test_all_that_nvml_counts_of_a_card_may_be_asked_for():
    assert find_target(replace(ASKED, memory="92GiB")).budget_bytes == 92 * 2**30
    assert find_target(replace(ASKED, memory="93.5GiB")).budget_bytes == H100.usable_bytes
    with pytest.raises(BadInput, match="94GiB") as refused:
        find_target(replace(ASKED, memory="94GiB"))
    assert refused.value.next_step == "Ask for at most 93.5GiB, or leave --memory out."


def wish(tmp_path, target=TARGET, out="profiles", headroom=0.03, tokens=None, **asked) -> ProfilesAsked:
    return ProfilesAsked(
        asked=replace(ASKED, **asked), target=target, out=tmp_path / out, headroom_share=headroom,
        global_batch_tokens=tokens,
    )  # fmt: skip


def predicted(of: ProfilesAsked, model=0, **changes) -> Predicted:
    """As a trace would say it."""
    config = config_of(of.asked, CHOICES, of.asked.models[model])
    return Predicted(
        **{
            "config": config, "parameters": 109_518_912, "attention": "sdpa", "attention_reason": "dropout",
            "budget_bytes": of.target.budget_bytes, "rows": 430, "rows_low": 416, "rows_high": 444,
            "ledger": Ledger(rows=430, peak_bytes=99, terms_bytes={"parameters": 90, "optimizer": 9}),
            "per_row_bytes": 1.0, "contents": contents(of.asked, config), "traces": 4,
        } | changes
    )  # fmt: skip


def profile_of(of: ProfilesAsked, tmp_path, **changes):
    return estimated_profile(predicted(of, **changes), of, tmp_path / "profiles" / "p.toml", traced_with="torch 2")


def test_the_lower_end_of_the_prediction_less_the_headroom_is_used(tmp_path):
    profile = profile_of(wish(tmp_path), tmp_path)
    assert profile.train.micro_batch_rows == 403
    assert profile_of(wish(tmp_path, headroom=0.5), tmp_path).train.micro_batch_rows == 208
    estimate = profile.evidence.estimate
    assert estimate is not None
    assert (estimate.rows_least, estimate.rows_usual, estimate.rows_most) == (416, 430, 444)
    assert (estimate.predicted_peak_bytes, estimate.terms_bytes) == (99, {"parameters": 90, "optimizer": 9})
    assert "not probed" in estimate.choice
    assert profile.is_estimated


def test_of_the_machine_only_what_the_catalogue_knows_is_said(tmp_path):
    there = profile_of(wish(tmp_path), tmp_path).fingerprint
    known = {name for name, value in there.model_dump().items() if value is not None}
    assert known == {"device", "gpu_name", "gpu_total_bytes", "model_sha256"}
    assert (there.gpu_name, there.gpu_total_bytes) == ("NVIDIA H100 NVL", 95_830 * 2**20)
    assert profile_of(wish(tmp_path), tmp_path).provenance.commands == ["estimate"]
    assert profile_of(wish(tmp_path), tmp_path).provenance.ledger_sha256 is None


def test_settings_that_were_predicted_for_are_the_profiles(tmp_path):
    of = wish(tmp_path, ranks=2, accumulate=False, seq_length_tokens=256)
    profile = profile_of(of, tmp_path)
    assert (profile.train.precision, profile.train.layout, profile.train.device) == ("bf16", "packed", "cuda")
    assert profile.train.seq_length_tokens == 256
    assert profile.local_ranks == 2
    assert profile.evidence.estimate.micro_batches_per_step == 1


def test_without_a_dataset_the_batch_is_the_default_and_called_assumed(tmp_path):
    profile = profile_of(wish(tmp_path), tmp_path)
    assert (profile.train.global_batch_rows, profile.train.global_batch_tokens) == (1027, None)
    assert profile.constraints.global_batch_tokens == 524_288
    assert profile.evidence.estimate.rows_assumed
    assert (profile.train.data.path, profile.train.data.dataset_hash) == (None, None)


def test_a_batch_in_tokens_is_kept_in_tokens_where_rows_are_assumed(tmp_path):
    train = profile_of(wish(tmp_path, tokens=51_046), tmp_path).train
    assert (train.global_batch_tokens, train.global_batch_rows) == (51_046, 100)


def test_with_a_dataset_rows_follow_from_it_and_another_one_will_be_refused(tmp_path, patterned_dataset):
    of = wish(tmp_path, data=patterned_dataset, seq_length_tokens=64, tokens=5000)
    profile = profile_of(of, tmp_path)
    dataset = read_manifest(patterned_dataset).dataset_hash
    assert profile.fingerprint.dataset_hash == profile.train.data.dataset_hash == dataset
    assert (tmp_path / "profiles" / profile.train.data.path).resolve() == patterned_dataset.resolve()
    assert profile.train.global_batch_tokens is None
    mean = profile.mean_real_tokens_per_row
    assert mean is not None
    assert profile.train.global_batch_rows == round(5000 / mean)
    assert profile.evidence.estimate.vocab_size == 128


def test_a_cpu_has_no_card_and_no_gpus(tmp_path):
    target = Target(name="a CPU with 2 GiB", budget_bytes=2**31, expected=expected_on_cpu())
    of = wish(tmp_path, target=target, device="cpu", gpu=None, memory="2 GiB")
    there = profile_of(of, tmp_path).fingerprint
    assert (there.device, there.gpu_name, there.gpu_count) == ("cpu", None, 0)
    assert of.place_name == "cpu-2gib"


def test_files_are_named_for_model_and_card_or_for_the_memory(tmp_path):
    models = (model_settings("bert-120m"), model_settings("bert-350m"))
    places = profile_places(wish(tmp_path, models=models), CHOICES)
    assert [path.name for path in places.values()] == ["bert-120m-h100-nvl-94gb.toml", "bert-350m-h100-nvl-94gb.toml"]
    unnamed = wish(tmp_path, target=replace(TARGET, card=None), gpu=None, memory="94GB")
    assert [path.name for path in profile_places(unnamed, CHOICES).values()] == ["bert-120m-gpu-94gb.toml"]


def test_what_cannot_be_written_is_refused_before_anything_is_traced(tmp_path):
    with pytest.raises(UsageError, match="one file for 2 models"):
        models = (model_settings("bert-120m"), model_settings("bert-350m"))
        profile_places(wish(tmp_path, models=models, out="p.toml"), CHOICES)
    with pytest.raises(BadInput, match="leaves some of 8 ranks without a row"):
        profile_places(wish(tmp_path, ranks=8, tokens=1000), CHOICES)


def test_a_measured_profile_keeps_its_place_and_an_estimated_one_does_not(tmp_path):
    of = wish(tmp_path, out="p.toml")
    (tmp_path / "p.toml").write_text(profile_to_toml(profile_of(of, tmp_path)))
    assert profile_places(of, CHOICES)["bert-120m"] == tmp_path / "p.toml"
    (tmp_path / "p.toml").write_text(profile_to_toml(example_profile()))
    with pytest.raises(ProfileRefused, match="was measured") as refused:
        profile_places(of, CHOICES)
    assert "--out" in refused.value.next_step


def test_every_model_that_fits_gets_its_profile_and_what_lay_there_is_kept(tmp_path):
    of = wish(tmp_path, out="p.toml")
    answer = Answer(target="", predicted=(predicted(of),), refused=(), what_ifs=(), traced_with="torch 2.13.0")
    places = profile_places(of, CHOICES)
    (first,) = write_profiles(answer, of, places)
    assert first.previous is None
    stored = read_profile(first.path)
    assert (stored.profile, stored.intact) == (first.profile, True)
    assert stored.profile.evidence.estimate.traced_with == "torch 2.13.0"
    (again,) = write_profiles(answer, replace(of, headroom_share=0.1), places)
    assert again.previous == tmp_path / "p.previous.toml"
    assert read_profile(again.previous).profile == first.profile
