import pytest

from autotune.core.cards import RESERVE_BYTES, find_card
from autotune.decide.search import Prediction, Tried
from autotune.search.probe import Search
from benchmarks.gpu.check.children import Ended
from benchmarks.gpu.check.results import Sheet, StageResult
from benchmarks.gpu.check.rig import NoTimeLeft, TimeBox, TrialFailed
from benchmarks.gpu.check.sizes import FULL
from benchmarks.gpu.stage import memory
from benchmarks.gpu.stage.memory import IMITATED, SETTINGS, Setting, imitated_card, paper_style, request_for, tuned
from tests.benchmarks.gpu.cards import FIXED_BYTES, ROW_BYTES, card
from tests.benchmarks.gpu.rigs import facts, make_rig
from tests.fakes import FakeClock

NVL_BYTES = find_card(IMITATED).default_budget_bytes


def account(traced=1.0, calibrated=1.0, predicted=100):
    return {
        "peak_bytes": 1000, "traced_peak_bytes": 1000 * traced, "calibrated_peak_bytes": 1000 * calibrated,
        "largest_rows": 100, "predicted_rows": predicted, "trials": [],
    }  # fmt: skip


def errors(*accounts) -> dict[str, float | None]:
    sheet = Sheet()
    memory._write_errors(sheet, accounts)
    return {figure.name: figure.value for figure in sheet.figures}


OF_PAPER = {model: {"largest_rows": 150, "trials": []} for model in FULL.tuned_models}
GOOD = Ended(exit_code=0, cut_off=False, tail="")


def measured(tmp_path, *, seconds: float, paper=OF_PAPER, paper_ended=GOOD, earlier=None):
    clock = FakeClock()
    rig = make_rig(tmp_path, card(clock), gpu=facts(), sizes=FULL, clock=clock)
    rig.unfinished = {"memory": earlier} if earlier else {}
    rig.program = lambda *_, known: (paper | known, paper_ended)
    sheet, error = Sheet(), None
    try:
        memory.measure(rig, sheet, TimeBox(clock=clock, end_s=clock.monotonic_s() + seconds))
    except (NoTimeLeft, TrialFailed) as no_end:
        error = no_end
    return {figure.name: figure.value for figure in sheet.figures}, sheet.details["settings"], error, rig


def test_there_are_a_dozen_configurations_and_all_differ():
    names = [one.name for one in SETTINGS]
    assert len(set(names)) == len(names) >= 12


def test_both_presets_come_first_as_the_paper_sets_them_up_and_tuned():
    assert {(one.model, one.style) for one in SETTINGS[:4]} == {
        (model, style) for model in ("bert-120m", "bert-350m") for style in memory.STYLES
    }
    paper = paper_style("bert-120m")
    assert (paper.precision, paper.layout, paper.head, paper.micro_batches) == ("fp32", "padded", "dense", 1)
    assert tuned("bert-120m").dropout == 0.0


def test_the_configuration_reaches_the_trial(tmp_path):
    rig = make_rig(tmp_path, card(FakeClock()), gpu=facts(), sizes=FULL)
    request = request_for(rig.site, rig.sizes, paper_style("bert-120m"))
    config = memory.trace_request(request).config
    assert (config.head, config.layout, config.precision) == ("dense", "padded", "fp32")
    assert config.global_batch_rows == config.micro_batch_rows


@pytest.mark.parametrize(
    ("total_bytes", "imitated"), [(143_771 * 2**20, True), (81_559 * 2**20, False), (95_830 * 2**20, False)]
)
def test_only_a_larger_card_is_limited_to_an_h100_nvl(tmp_path, total_bytes, imitated):
    rig = make_rig(tmp_path, card(FakeClock()), gpu=facts(total_bytes), sizes=FULL)
    assert (imitated_card(rig.site) is not None) == imitated
    budget = request_for(rig.site, rig.sizes, Setting(model="bert-120m")).memory_budget_bytes
    assert budget == (NVL_BYTES if imitated else total_bytes - 2**29 - RESERVE_BYTES)
    whole = request_for(rig.site, rig.sizes, Setting(model="bert-120m", card="whole")).memory_budget_bytes
    assert whole == total_bytes - 2**29 - RESERVE_BYTES


def test_errors_count_in_both_directions_and_only_too_many_rows_count_as_above():
    found = errors(account(0.98, 1.005, 90), account(1.05, 0.99, 102))
    assert found["configurations_count"] == 2
    assert found["median_error_before_trials_share"] == pytest.approx(0.035)
    assert found["worst_error_before_trials_share"] == pytest.approx(0.05)
    assert found["median_error_after_calibration_share"] == pytest.approx(0.0075)
    assert found["predicted_rows_above_true_share"] == pytest.approx(0.02)


def test_what_was_not_measured_counts_for_nothing():
    found = errors({"not measured": "no time left"})
    assert found.pop("configurations_count") == 0
    assert set(found.values()) == {None}


def test_the_largest_micro_batch_of_every_configuration_is_found_even_untraced(tmp_path):
    figures, settings, error, rig = measured(tmp_path, seconds=36_000)
    assert error is None
    rows = (NVL_BYTES - FIXED_BYTES) // ROW_BYTES
    assert figures["tuned_bert_120m_largest_rows_count"] == rows
    assert figures["paper_style_bert_350m_largest_rows_count"] == rows
    assert figures["paper_step_bert_350m_largest_rows_count"] == 150
    assert len(settings) == len(SETTINGS)
    assert all(one["not_traced"] for one in settings.values())
    assert rig.largest.request.settings.name == "bert-120m"


def test_a_cut_off_stage_keeps_what_it_had(tmp_path):
    figures, settings, error, _ = measured(tmp_path, seconds=200)
    assert error is not None
    assert figures["tuned_bert_120m_largest_rows_count"]
    done = [one for one in settings.values() if "peak_bytes" in one]
    assert 0 < len(done) < len(SETTINGS)
    assert {one["not measured"] for one in settings.values() if "peak_bytes" not in one} == {"no time"}


def test_what_was_made_with_another_version_is_measured_anew(tmp_path):
    _, settings, _, rig = measured(tmp_path / "first", seconds=300)
    earlier = StageResult(
        name="memory", status="not measured", measured_utc="2026-01-02T03:04:05+00:00",
        details={"settings": settings}, made_with=rig.made_with | {"torch": "1.0"},
    )  # fmt: skip
    sheet = Sheet()
    rig.unfinished = {"memory": earlier}
    assert rig.go_on("memory", sheet) is None
    assert not sheet.details


def test_a_prediction_is_calibrated_by_the_first_trial_that_fitted_and_by_no_later_one(tmp_path):
    rig = make_rig(tmp_path, card(FakeClock()), gpu=facts(), sizes=FULL)
    search = Search(request=request_for(rig.site, rig.sizes, tuned("bert-120m")), runner=rig.runner(None))
    search.prediction = Prediction(peak_bytes=lambda rows: rows * 10.0**9)
    search.tried = [
        Tried(rows=30, fits=False), Tried(rows=10, fits=True, peak_bytes=11 * 10**9),
        Tried(rows=19, fits=True, peak_bytes=25 * 10**9), Tried(rows=20, fits=True, peak_bytes=26 * 10**9),
    ]  # fmt: skip
    found = memory.account(search)
    assert (found["largest_rows"], found["calibrated_by_rows"]) == (20, 10)
    assert found["calibrated_peak_bytes"] == pytest.approx(21 * 10**9, rel=0.001)


@pytest.mark.parametrize("status", ["not measured", "failed"])
def test_what_was_not_ended_goes_on_with_what_is_missing(status, tmp_path, capsys):
    _, settings, error, rig = measured(tmp_path / "first", seconds=300)
    assert error is not None
    capsys.readouterr()
    had = {name: one for name, one in settings.items() if "peak_bytes" in one}
    cut_off = {"bert-120m": {"largest_rows": 170, "trials": [[170, True]]}}
    earlier = StageResult(
        name="memory", status=status, measured_utc="2026-01-02T03:04:05+00:00", made_with=rig.made_with,
        details={"settings": settings, "paper_step": cut_off},
    )  # fmt: skip
    figures, settings, error, _ = measured(tmp_path / "second", seconds=36_000, earlier=earlier)
    assert error is None
    assert figures["configurations_count"] == 0  # nothing can be traced on this card
    assert all("peak_bytes" in one for one in settings.values())
    assert {name: settings[name] for name in had} == had
    told = [line.strip().partition(": ") for line in capsys.readouterr().err.splitlines() if "rows fit" in line]
    assert [f"{name}: {rest.rpartition(': ')[0]}" for name, _, rest in told] == [
        one.name for one in SETTINGS if one.name not in had
    ]
    assert figures["tuned_bert_120m_largest_rows_count"] == had[tuned("bert-120m").name]["largest_rows"]
    assert figures["paper_step_bert_120m_largest_rows_count"] == 170


def test_a_paper_style_step_that_fails_costs_no_configuration(tmp_path):
    broken = Ended(exit_code=1, cut_off=False, tail="no such kernel")
    _, settings, error, _ = measured(tmp_path, seconds=36_000, paper={}, paper_ended=broken)
    assert isinstance(error, TrialFailed)
    assert all("peak_bytes" in one for one in settings.values())
