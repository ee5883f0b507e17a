from pathlib import Path
from types import SimpleNamespace

import pytest

from autotune.core.evidence import BaselineEvidence, Evidence, JointChoice, RecipeRow
from autotune.core.profile import profile_to_toml
from autotune.decide.ledger import ledger_sha256
from autotune.errors import MachineLacks, ProfileRefused
from autotune.search.profiles import (
    probed_here,
    read_profile,
    read_trials,
    with_evidence,
    with_workers,
    with_workers_of,
    write_profile,
)
from autotune.search.trials import records_in
from autotune.store import Ledger
from tests.autotune.profiles import but, example_profile
from tests.autotune.trials import record, records_of_example

RUNNER = SimpleNamespace(ledger=SimpleNamespace(directory=Path("nowhere")))
EXAMPLE = example_profile()


def probed_again(**train):
    """What a probe alone gives: no worker count yet."""
    data = EXAMPLE.train.data.model_copy(update={"loader_workers": 0})
    probed = but(EXAMPLE, train={"data": data} | train)
    return probed.model_copy(update={"evidence": Evidence(probe=EXAMPLE.evidence.probe)})


@pytest.fixture
def path(here):
    """Of the example profile."""
    return here / "p.toml"


def test_a_repeated_probe_keeps_the_loader_of_the_same_settings_as_it_was_counted_or_adopted_jointly(path):
    kept = with_workers_of(probed_again(), path)
    assert kept.train.data.loader_workers == 1
    assert kept.evidence.workers == EXAMPLE.evidence.workers
    assert write_profile(path, kept) is None
    swept = with_workers(EXAMPLE, swept_to(3, adopted=True), RUNNER)
    path.write_text(profile_to_toml(swept))
    assert with_workers_of(probed_again(), path).train.data == swept.train.data


def test_another_micro_batch_loses_the_worker_count_and_keeps_the_old_profile_or_what_else_was_there(path):
    new = with_workers_of(probed_again(micro_batch_rows=1), path)
    assert new.evidence.workers is None
    assert read_profile(write_profile(path, new)).profile == EXAMPLE
    assert read_profile(path).profile == new
    path.write_text("mine = 1\n")
    assert write_profile(path, EXAMPLE).read_text() == "mine = 1\n"
    assert read_profile(path).profile == EXAMPLE


def test_a_micro_batch_beyond_what_was_shown_to_fit_and_rates_of_a_pretended_gpu_are_refused(path):
    text = path.read_text()
    path.write_text(text.replace("micro_batch_rows = 2", "micro_batch_rows = 3"))
    with pytest.raises(ProfileRefused, match="more than the 2"):
        probed_here(read_profile(path))
    path.write_text(text.replace("[fingerprint]", '[fingerprint]\ndriver = "0.0 (nullgpu)"'))
    with pytest.raises(MachineLacks, match="a profile's tokens/s cannot be measured on a pretended"):
        read_profile(path)


def swept_to(chosen, *, adopted=None):
    joint = JointChoice(
        trials=12, loader_workers=5, prefetch_batches=8, pin_memory=False, ratio_to_workers_alone=1.2,
        adopted=adopted is True,
    )  # fmt: skip
    joint = None if adopted is None else joint
    return EXAMPLE.evidence.workers.model_copy(update={"chosen": chosen, "joint": joint})


@pytest.mark.parametrize(("adopted", "loader"), [(None, (3, 2, True)), (True, (5, 8, False)), (False, (3, 2, True))])
def test_a_sweep_writes_its_count_or_what_was_adopted_jointly_and_its_evidence_and_is_named_once(adopted, loader):
    found = swept_to(3, adopted=adopted)
    profile = with_workers(with_workers(EXAMPLE, swept_to(2), RUNNER), found, RUNNER)
    names = ("loader_workers", "prefetch_batches", "pin_memory")
    written = EXAMPLE.train.data.model_copy(update=dict(zip(names, loader, strict=True)))
    assert profile.train.data == written
    assert profile.evidence.workers == found
    assert profile.evidence.probe == EXAMPLE.evidence.probe
    assert profile.provenance.commands == ["probe", "workers"]


WORTH = BaselineEvidence(
    rows=[RecipeRow(name="tuned", real_tokens_per_s=[9.0], speedup=1.0, outcome="ran")],
    local_ranks=1, window_s=2.0, windows=1, seconds=3.0,
)  # fmt: skip


@pytest.mark.parametrize(("chosen", "kept"), [(1, WORTH), (2, None)])
def test_what_settings_are_worth_changes_nothing_about_them_and_goes_with_them(chosen, kept):
    worth = with_evidence(EXAMPLE, "baseline", WORTH, RUNNER)
    assert (worth.train, worth.evidence.baseline) == (EXAMPLE.train, WORTH)
    assert worth.provenance.commands == ["probe", "baseline"]
    changed = with_workers(worth, swept_to(chosen), RUNNER)
    assert changed.evidence.baseline == kept
    assert changed.provenance.commands == ["probe", *(["baseline"] if kept else []), "workers"]


def test_of_two_profiles_of_one_name_each_has_its_own_trials_and_names_them_by_hash_and_time(tmp_path):
    finished, damaged, check = read_trials(tmp_path / "p.toml", EXAMPLE, tmp_path)
    assert (finished, damaged, check.found) == ((), 0, "no trials")
    ledger, newest = Ledger(tmp_path / "p" / "ledger", "w"), "2026-01-02T00:00:00+00:00"
    mine = (*records_of_example(), record(time_utc=newest, key="newest"))
    theirs = record(site="there", dataset_hash="e", time_utc="2026-01-03T00:00:00+00:00")
    for one in (*mine, theirs):
        ledger.append(one.model_dump(mode="json"))
    found = with_workers(EXAMPLE, swept_to(3), SimpleNamespace(ledger=ledger)).provenance
    assert found.ledger_until_utc == newest
    kept = [one for one in records_in(ledger.directory)[0] if one.site == "here"]
    assert (len(kept), found.ledger_sha256) == (len(mine), ledger_sha256(kept))
    ledger.append({"no": "trial"})
    other = but(EXAMPLE, fingerprint={"dataset_hash": "e"})
    for place, profile, expected in (("a", EXAMPLE, (len(mine), 1, 1)), ("b", other, (1, 1, len(mine)))):
        finished, damaged, check = read_trials(tmp_path / place / "p.toml", profile, tmp_path)
        assert (len(finished), damaged, check.others) == expected
