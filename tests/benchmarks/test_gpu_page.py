"""Results of the GPU check: figures, page, and reasons not to keep them."""

import json
import re
from types import SimpleNamespace

import pytest

from autotune.evidence.confirm import ConfirmEvidence, DeliveredTraining, SplitRates
from autotune.profiles.toml_file import profile_to_toml
from benchmarks.gpu.claims import CLAIMS
from benchmarks.gpu.figures import figures_of
from benchmarks.gpu.keeping import keep, ship_capped_profiles
from benchmarks.gpu.page import MARK, PAGE, newest_figures, page, results
from benchmarks.gpu.plausibility import reasons_against
from benchmarks.gpu.results import ENDED, KEPT
from benchmarks.gpu.running import open_check
from testbed.examples.checkpoints import header_of
from testbed.examples.profiles import but
from testbed.examples.run_rows import row_of
from testbed.examples.tuning import example_profile

NVL, DRIVER = "NVIDIA H100 NVL", "580.82.07"
PROFILE = "profiles/bert-120m-h100-nvl.toml"
CONFIRM = ConfirmEvidence(
    rows=[
        SplitRates(
            micro_batch_size=64,
            gradient_accumulation_steps=2,
            micro_batches_measured=2,
            tokens_per_s=[500_000.0],
        )
    ],
    num_workers=2,
    local_ranks=1,
    promised_tokens_per_s=500_000.0,
    delivered=DeliveredTraining(tokens_per_s=495_000.0, steps=10, seconds=9.0),
    window_s=2.0,
    windows=3,
    seconds=60.0,
)


def trainer(name, rate, call="2026-01-01"):
    answer = {
        "trainer": name,
        "model": "bert-120m",
        "settings": "bf16",
        "batch": 128,
        "tokens_per_s": rate,
        "peak_bytes": 2**30,
        "model_flops_per_s": 1e14,
    }
    return ended(answer, call)


def ended(answer, call="2026-01-01"):
    return {
        "status": ENDED,
        "answer": answer,
        "seconds": 1.0,
        "call": call,
        "began_utc": f"{call}T00:00:00+00:00",
        "made_with": {"driver": DRIVER},
        "words": [],
    }


@pytest.fixture
def real(tmp_path):
    """Return the folder of a check of a real GPU, and the check."""
    (tmp_path / "profiles").mkdir()
    profile = but(example_profile("d"), evidence={"confirm": CONFIRM})
    (tmp_path / PROFILE).write_text(profile_to_toml(profile))
    directory = tmp_path / "runs/bert-120m"
    directory.mkdir(parents=True)
    header = header_of(profile.train, device=NVL, driver=DRIVER, parameters=10**8)
    (directory / "run.json").write_text(header.model_dump_json())
    rows = [
        row_of(
            number,
            tokens_per_s=400_000.0 * header.world_size,
            tokens_per_s_per_rank=400_000.0,
            mfu=0.3,
        )
        for number in range(1, 5)
    ]
    lines = [row.model_dump_json() + "\n" for row in rows]
    (directory / "steps.jsonl").write_text("".join(lines))
    facts = SimpleNamespace(name=NVL, driver=DRIVER)
    site = SimpleNamespace(
        gpu=facts, gpus=(facts,), versions={"torch": "2.14.1+cu130"}, name="h100-nvl"
    )
    check = open_check(tmp_path, site, tiny=False)
    proof = ended({"right": True, "flops_per_s": 600e12})
    check["proofs"] = [proof]
    check["references"] = [
        {"call": "2026-01-01", "stage": "train-bert-120m", "tokens_per_s": 400_000.0}
    ]
    check["stages"] = {
        "arithmetic": proof,
        "tune-bert-120m": ended(None),
        "train-bert-120m": ended(None),
        "trainer-compiled": trainer("compiled", 200_000.0),
        "trainer-bf16": trainer("bf16", 100_000.0),
        "trainer-paper": trainer("paper", 40_000.0),
    }
    check["figures"] = figures_of(tmp_path, check)
    return tmp_path, check


def figure(check, name):
    figures = newest_figures([check])
    return next(claim for claim in CLAIMS if claim.name == name).bar(figures).figure


def test_fair_comparison_is_with_the_fastest_trainer(real):
    folder, check = real
    assert figure(check, "against_fastest_trainer_ratio") == 2.0
    check["stages"]["trainer-grouped"] = trainer("grouped", 300_000.0, "2026-01-02")
    check["figures"] = figures_of(folder, check)
    assert figure(check, "against_fastest_trainer_ratio") is None


def test_delivered_is_compared_with_promised(real):
    _, check = real
    assert figure(check, "delivered_to_promised_least_ratio") == pytest.approx(0.8)
    assert figure(check, "delivered_to_promised_most_ratio") == pytest.approx(0.99)


def test_real_check_is_kept_by_gpu(real):
    folder, check = real
    assert reasons_against(folder, check) == []
    check["started_utc"] = "2026-01-01T00:00:00+00:00"
    kept = folder / "kept"
    directory = keep(folder, check, kept)
    assert directory == kept / "h100-nvl/2026-01-01"
    (directory / "profiles/old.toml").touch()
    keep(folder, check, kept)
    files = {str(path.relative_to(directory)) for path in directory.rglob("*")}
    assert files == {"check.json", "profiles", PROFILE}
    other = keep(folder, check | {"started_utc": "2026-01-01T09:30:00+00:00"}, kept)
    assert other.name == "2026-01-01T0930"


def test_page_shows_the_newest_figure_of_each_gpu(real):
    folder, check = real
    checks = []
    for day, mfu in (("2026-01-01", 0.3), ("2026-02-01", 0.4)):
        row = {"training": "bert-120m", "mfu_share": mfu}
        figures = {**check["figures"], "training": [row]}
        if day == "2026-02-01":
            figures = {"training": [row]}
        dated = {"started_utc": f"{day}T00:00:00+00:00", "figures": figures}
        checks.append(check | dated)
        keep(folder, checks[-1], folder / "kept")
    text = page(f"# Words\n\n{MARK}\n\nold figures\n", folder / "kept")
    assert text.startswith(f"# Words\n\n{MARK}\n\n### 1 x {NVL}\n")
    assert "old figures" not in text
    assert "| MFU of bert-120m in training | 40.0 % | ≥ 40.0 % | ok |" in text
    head, _, row = text[text.index("| configuration |") :].splitlines()[:3]
    cells = dict(zip(*(re.split(r" *\| *", line) for line in (head, row)), strict=True))
    probe = example_profile("d").evidence.probe
    assert (cells["traced"], cells["largest"], cells["date"]) == (
        str(probe.traced_micro_batch_size),
        str(probe.feasible_max),
        "2026-01-01",
    )


def test_memory_is_that_of_profiles_measured_in_the_check(real):
    folder, check = real
    brought = folder / "profiles/bert-350m-h100-nvl.toml"
    brought.write_text((folder / PROFILE).read_text())
    [memory] = figures_of(folder, check)["memory"]
    assert memory["configuration"] == "bert-120m"


def test_capped_profiles_are_shipped(tmp_path):
    (tmp_path / "profiles").mkdir()
    (tmp_path / "profiles/a-h100-nvl-94gb.toml").write_text("x")
    (tmp_path / "profiles/a-h200.toml").write_text("y")
    (tmp_path / "shipped").mkdir()
    ship_capped_profiles(tmp_path, "h100-nvl-94gb", tmp_path / "shipped")
    shipped = [path.name for path in (tmp_path / "shipped").iterdir()]
    assert shipped == ["a-h100-nvl-94gb.toml"]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"tiny": True}, "tiny sizes"),
        ({"tiny": None}, "tiny sizes"),
        ({"driver": "0.0 (nullgpu)"}, "a pretended NVIDIA H100 NVL"),
        ({"driver": None}, "its driver is not known"),
        ({"gpu": "NVIDIA Unheard Of"}, "no peak is known of NVIDIA Unheard Of"),
        ({"gpu": None}, "no peak is known of None"),
        ({"gpu": "NVIDIA H200"}, f"{PROFILE} is of NVIDIA H100 NVL"),
    ],
)
def test_unknown_machine_is_not_kept(real, change, reason):
    folder, check = real
    check["made_with"].update(change)
    assert reason in " ".join(reasons_against(folder, check))


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (None, "matmuls are wrong, or were not checked"),
        ({"right": False, "flops_per_s": 6e14}, "matmuls are wrong"),
        ({"right": True}, "0 FLOP/s are not plausible for NVIDIA H100 NVL"),
        (
            {"right": True, "flops_per_s": 8.6e15},
            "8.6e+15 FLOP/s are not plausible for NVIDIA H100 NVL",
        ),
        (
            {"right": True, "flops_per_s": 1e11},
            "1e+11 FLOP/s are not plausible for NVIDIA H100 NVL",
        ),
    ],
)
def test_gpu_that_computes_wrong_is_not_kept(real, answer, reason):
    folder, check = real
    check["proofs"][0]["answer"] = answer
    assert reason in " ".join(reasons_against(folder, check))


def test_every_call_proves_its_gpu(real):
    folder, check = real
    check["stages"]["doctor"] = ended(None, "2026-01-02")
    assert "were not checked" in " ".join(reasons_against(folder, check))


def test_check_without_measurements_is_not_kept(real):
    folder, check = real
    (folder / PROFILE).unlink()
    (folder / "runs/bert-120m/run.json").unlink()
    check["stages"] = {"arithmetic": check["proofs"][0]}
    assert reasons_against(folder, check) == ["nothing was measured"]


def test_simulated_gpu_is_remembered(real, monkeypatch):
    folder, check = real
    (folder / "check.json").write_text(json.dumps(check))
    facts = SimpleNamespace(name=NVL, driver=DRIVER)
    site = SimpleNamespace(gpu=facts, gpus=(facts,), versions={}, name="h100-nvl")
    monkeypatch.setenv("NULLGPU_DRIVER", DRIVER)
    check = open_check(folder, site, tiny=False)
    (folder / "check.json").write_text(json.dumps(check))
    monkeypatch.delenv("NULLGPU_DRIVER")
    check = open_check(folder, site, tiny=False)
    assert "NULLGPU_DRIVER is set" in " ".join(reasons_against(folder, check))


def test_implausible_profile_is_not_kept(real):
    folder, check = real
    profile = example_profile("d")
    probe = profile.evidence.probe
    curve = [point.model_copy(update={"units_per_s": 5e7}) for point in probe.curve]
    too_fast = but(
        profile, evidence={"probe": probe.model_copy(update={"curve": curve})}
    )
    good = (folder / PROFILE).read_text()
    edited = good.replace("micro_batch_size = 64", "micro_batch_size = 65", 1)
    for text, reason in (
        (profile_to_toml(too_fast), "exceeds its peak of 835"),
        (edited, "it was edited"),
    ):
        (folder / PROFILE).write_text(text)
        assert reason in " ".join(reasons_against(folder, check))


def test_implausible_run_is_not_kept(real):
    folder, check = real
    steps = folder / "runs/bert-120m/steps.jsonl"
    steps.write_text(row_of(1, tokens_per_s=1e9).model_dump_json() + "\n")
    assert "runs/bert-120m/run.json: " in " ".join(reasons_against(folder, check))


def test_implausible_answer_is_not_kept(real):
    folder, check = real
    answer = {"steps": [{"model_flops_per_s": 1e15}]}
    check["stages"]["step-new-64"] = ended(answer)
    assert "step-new-64: 1,000 TFLOP/s" in " ".join(reasons_against(folder, check))


def test_unmeasured_claims_are_listed():
    text = results([])
    for claim in CLAIMS:
        assert f"`--only {claim.measured_by}`" in text


def test_page_holds_the_kept_checks():
    written = PAGE.read_text()
    assert written == page(written, KEPT)
