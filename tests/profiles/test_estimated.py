"""Shipped profiles of cards that nobody here has: they say so, and they are what the code predicts today."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from autotune.core.cards import find_card
from autotune.decide.choose import choose_predicted, deal
from autotune.search.profiles import StoredProfile, read_profile
from trainer.presets import model_settings

ROOT = Path(__file__).parents[2]
SHIPPED = {path.stem: path for path in (ROOT / "profiles").glob("*-h100-nvl-94gb.toml")}


def test_both_sizes_of_the_paper_are_shipped():
    assert set(SHIPPED) == {"bert-120m-h100-nvl-94gb", "bert-350m-h100-nvl-94gb"}


@pytest.fixture(params=sorted(SHIPPED))
def shipped(request) -> StoredProfile:
    return read_profile(SHIPPED[request.param])


def test_it_says_that_nothing_in_it_was_measured(shipped):
    profile, evidence = shipped.profile, shipped.profile.evidence
    assert shipped.intact
    assert profile.is_estimated
    assert shipped.path.read_text().startswith("# An estimated profile: ")
    assert evidence.estimate.label == "predicted"
    assert "not probed" in evidence.estimate.choice
    assert evidence.probe is evidence.workers is evidence.network is evidence.baseline is evidence.explore is None


def test_its_decisions_follow_from_what_it_says(shipped):
    profile, estimate = shipped.profile, shipped.profile.evidence.estimate
    card = find_card(estimate.card)
    assert (profile.fingerprint.gpu_name, profile.fingerprint.gpu_total_bytes) == (card.name, card.total_bytes)
    assert profile.constraints.memory_budget_bytes == card.default_budget_bytes
    assert profile.train.model == model_settings(profile.train.model.name)
    assert sum(estimate.terms_bytes.values()) == estimate.predicted_peak_bytes <= card.default_budget_bytes
    chosen = choose_predicted(estimate.rows_least, estimate.rows_most, profile.constraints.headroom_share)
    assert (profile.train.micro_batch_rows, estimate.choice) == (chosen.rows, chosen.reason)
    assert not deal(profile.train.global_batch_rows, profile.train.micro_batch_rows, estimate.local_ranks).empty_rows


@pytest.mark.slow
@pytest.mark.system
def test_the_documented_command_writes_the_same_again(tmp_path):
    documented = (ROOT / "docs" / "profiles.md").read_text()
    (command,) = set(re.findall(r"^(autotune estimate .*) --out profiles$", documented, re.MULTILINE))
    words = [sys.executable, "-m", *shlex.split(command), "--out", "profiles"]
    subprocess.run(words, cwd=tmp_path, check=True, capture_output=True, timeout=600)
    for name, path in SHIPPED.items():
        assert decisions(tmp_path / "profiles" / path.name) == decisions(path), name


def decisions(path: Path) -> dict[str, object]:
    """All that a profile says but when and with which versions it was written."""
    tables = read_profile(path).profile.model_dump(mode="json", exclude={"provenance"})
    del tables["evidence"]["estimate"]["traced_with"]
    return tables
