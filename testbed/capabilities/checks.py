"""Checks of the answer of each capability, beside the exit code 0."""

import json
from typing import Any

from autotune.evidence.peak_contents import ContentKind, PeakContents
from testbed.capabilities.values import PROFILE, Result

PARAMETER_BYTES = 4 * (4 * (64 * 64 + 64) + 64 * 10 + 10)
"""Parameters of ``small_training.Network`` in fp32."""
REPLAYED_STEP_S = 0.05
"""Duration of a replayed step, in place of one that the loader cannot keep up with."""
SHARDED_SHARE = 0.75
"""Share of the optimizer state below which a rank has a shard of it: half, and
padding."""


def check_probe(result: Result) -> None:
    """Check sizes, memory, curve and knee, and that all of them agree."""
    table, probe = result.table, result.evidence["probe"]
    assert probe["infeasible_min"] == probe["feasible_max"] + 1
    assert not probe["is_lower_bound"]
    assert probe["feasible_peak_bytes"] <= table["constraints"]["memory_budget_bytes"]
    curve = {row["size"]: row for row in probe["curve"]}
    assert len(curve) > 1
    assert list(curve) == sorted(curve)
    assert max(curve) <= probe["feasible_max"]
    for size, row in curve.items():
        tokens = size * table["subject"]["units_per_size"]
        rate = tokens / row["step_s"]
        assert 0.5 * rate < row["units_per_s"] < 2 * rate
    assert set(probe["knee_micro_batch_sizes"]) <= set(curve)
    is_bundled = result.place.subject.is_bundled
    settings = table["train"] if is_bundled else table["settings"]
    assert settings["micro_batch_size"] in curve
    assert probe["choice"]
    [printed] = result.answer["profiles"]
    assert printed["evidence"]["probe"]["feasible_max"] == probe["feasible_max"]
    assert table["fingerprint"]["device"] == result.place.device


def check_ranks(result: Result, strategy: str, name: str) -> None:
    """Check a probe with two ranks, which wrote the profile of a name."""
    table = result.place.table(name)
    probe = table["evidence"]["probe"]
    assert probe["local_ranks"] == 2
    assert probe["feasible_max"] == 4
    assert probe["optimizer_steps"] >= 2
    if result.place.subject.is_bundled:
        parallel = table["train"].get("parallel", {})
        assert parallel.get("strategy", "ddp") == strategy
        return
    assert table["subject"]["table"]["arguments"] == {"strategy": strategy}
    if "contents" not in probe:
        # Lightning moves a sharded module, which is impossible while it is recorded.
        assert "Couldn't swap" in probe["contents_not_recorded"]
        return
    contents = PeakContents.model_validate(probe["contents"])
    # Parameters may be gathered at the peak; two moments are not.
    state_bytes = contents.bytes_by_kind[ContentKind.OPTIMIZER_STATE]
    is_sharded = state_bytes < SHARDED_SHARE * 2 * PARAMETER_BYTES
    assert is_sharded == (strategy == "fsdp2"), state_bytes


def check_contents(result: Result) -> None:
    """Check that the parts of the memory add up to its peak."""
    probe = result.evidence["probe"]
    if result.place.subject.is_bundled:
        assert sum(probe["traced_terms_bytes"].values()) == probe["traced_peak_bytes"]
        assert probe["traced_terms_bytes"]["parameters"] >= 4 * probe["parameters"]
        return
    contents = PeakContents.model_validate(probe["contents"])
    assert contents.not_attributed_bytes == contents.missed_releases_bytes == 0
    assert contents.peak_bytes <= probe["feasible_peak_bytes"]
    kinds = contents.bytes_by_kind
    assert kinds[ContentKind.PARAMETERS] >= PARAMETER_BYTES
    assert kinds[ContentKind.OPTIMIZER_STATE] >= 2 * PARAMETER_BYTES
    assert "refused_contents" in probe, probe.get("contents_not_recorded")
    refused = PeakContents.model_validate(probe["refused_contents"])
    assert refused.refused is not None
    shown = result.answer["evidence"]["probe"]["contents"]
    assert shown["peak_bytes"] == contents.peak_bytes


def check_workers(result: Result) -> None:
    """Check the windows, and that the chosen count is in the profile."""
    workers = result.evidence["workers"]
    counts = [row["num_workers"] for row in workers["rows"]]
    assert set(counts) <= {0, 1}
    assert workers["chosen"] in counts
    assert all(rate > 0 for rate in workers["cached_units_per_s"])
    for row in workers["rows"]:
        if "ratio_low" in row:  # a few windows show no spread
            assert row["ratio_low"] <= row["ratio_to_cached"] <= row["ratio_high"]
        assert all(rate > 0 for rate in row["units_per_s"])
    assert workers["unit"]
    assert _loader_settings(result)["num_workers"] == workers["chosen"]


def _loader_settings(result: Result) -> dict[str, Any]:
    """Return the settings of the loader that a profile has."""
    if result.place.subject.is_bundled:
        trainer_settings: dict[str, Any] = result.table["train"]["data"]
        return trainer_settings
    settings: dict[str, Any] = result.table["settings"]
    return settings


def check_prefetch(result: Result) -> None:
    """Check that prefetching or pinning was searched with the workers."""
    workers = result.evidence["workers"]
    assert workers["replayed_step_s"] == REPLAYED_STEP_S
    if result.place.subject.is_bundled:
        # Its loader is fast: a search is needed only if it does not keep up.
        assert workers["keeps_up"] or workers["undecided_between"] or "joint" in workers
        return
    assert not workers["keeps_up"]
    joint = workers["joint"]
    assert joint["trials"] > 1
    searched = {"prefetch_factor", "pin_memory"} & set(joint)
    assert searched
    if joint["adopted"]:
        settings = _loader_settings(result)
        assert all(settings[name] == joint[name] for name in searched)


def check_tune(result: Result) -> None:
    """Check that the phases ran, and the rate that the profile promises."""
    stages = {stage["name"]: stage for stage in result.answer["stages"]}
    for phase in ("probe", "confirm", "report"):
        assert stages[phase]["status"] == "done", stages[phase]["summary"]
    assert (result.place.folder / result.answer["report"]).is_file()
    [path] = result.answer["profiles"]
    table = result.place.table(path)
    confirm = table["evidence"]["confirm"]
    promised = confirm["promised_tokens_per_s"]
    assert promised > 0
    if "promised_low" in confirm:  # a few windows show no spread
        assert confirm["promised_low"] <= promised <= confirm["promised_high"]
    # The training either delivered a rate, or says why there is none.
    assert ("delivered" in confirm) != ("not_delivered" in confirm)


def check_advise(result: Result) -> None:
    """Check that each recommendation has its evidence, with units."""
    assert result.answer["advice"]
    for advice in result.answer["advice"]:
        assert advice["claim"]
        assert advice["would_change"]
        for figure in advice["evidence"]:
            assert figure["unit"]
            assert figure["source"]
    rules = {advice["rule"] for advice in result.answer["advice"]}
    assert "not-measured" in rules  # of what only the probe has measured


def check_compare(result: Result) -> None:
    """Check that a profile and its copy do not differ."""
    [comparison] = result.answer["comparisons"]
    assert comparison["settings"] == comparison["circumstances"] == []
    measured = comparison["a"]["measurements"]
    assert {"peak memory"} < {one["metric"]["name"] for one in measured}
    assert all(one["metric"]["unit"] for one in measured)
    assert all(one["estimate"]["value"] > 0 for one in measured)


def check_report(result: Result) -> None:
    """Check that the page shows the profile."""
    folder = result.place.folder
    probe, words = result.evidence["probe"], result.table["subject"]["words"]
    page = (folder / result.answer["html"]).read_text()
    assert words in page
    assert (
        f"{probe['feasible_max']}" in (folder / result.answer["markdown"]).read_text()
    )
    [profile] = json.loads((folder / result.answer["json"]).read_text())["profiles"]
    assert profile["path"] == PROFILE


def check_plan(result: Result) -> None:
    """Check that the plan predicts the time of a given number of steps."""
    assert result.answer["steps"]["value"] == 10
    assert result.answer["steps"]["basis"] == "given"
    assert result.answer["wall_s"]["value"] > 0
    assert result.answer["wall_s"]["basis"] in ("measured", "predicted")


def check_baseline(result: Result) -> None:
    """Check the rates of the tuned settings and of others."""
    baseline = result.evidence["baseline"]
    names = [row["name"] for row in baseline["rows"]]
    assert "tuned" in names
    assert len(names) > 1
    assert all(rate > 0 for row in baseline["rows"] for rate in row["units_per_s"])


def check_network(result: Result, name: str) -> None:
    """Check the links and steps that a command wrote into the profile of a name."""
    network = result.place.table(name)["evidence"]["network"]
    assert network["nodes"] * network["ranks_per_node"] == 2
    assert [link["members"] for link in network["links"]] == [2]
    if result.place.subject.is_bundled:
        assert any(row.get("step_s") for row in network["gradient_syncs"])
        return
    # Your code synchronises its gradients: its step is timed on one rank and on all.
    on_ranks = network["on_ranks"]
    assert on_ranks["unit"]
    assert all(seconds > 0 for seconds in on_ranks["one_rank_step_s"])
    assert all(seconds > 0 for seconds in on_ranks["all_ranks_step_s"])


def check_verify(result: Result) -> None:
    """Check that nothing of the profile contradicts machine or trials."""
    assert result.answer["intact"]
    assert result.answer["trial_log"]["trials"] > 1
    assert not result.answer["trial_log"]["unfounded"]
    differing = [
        check["field"]
        for check in result.answer["checks"]
        if check["found"] == "refuse"
    ]
    assert not differing


def check_study(result: Result) -> None:
    """Check that the file is a study with the trials of the search."""
    import optuna
    from optuna.storages.journal import JournalFileBackend, JournalStorage

    path = str(result.place.folder / "study.journal")
    storage = JournalStorage(JournalFileBackend(path))
    [study] = optuna.get_all_study_summaries(storage)
    assert study.n_trials > 1
