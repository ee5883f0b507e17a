"""A report of the check, as a GPU machine would leave it."""

from benchmarks.gpu.all import STAGES
from benchmarks.gpu.check.bars import bars_of
from benchmarks.gpu.check.results import CheckReport, Sheet, StageResult

GPU = {"facts": {"name": "NVIDIA H200"}}


def full_report(mfu: float = 0.47) -> CheckReport:
    """Training was measured, and memory failed; the rest was cut off."""
    sheet = Sheet()
    sheet.measured("bert_120m_real_tokens_per_s", 612_345.0)
    sheet.measured("bert_120m_mfu_share", mfu)
    train = StageResult(
        name="train",
        status="measured",
        measured_utc="2026-01-01T00:00:00",
        figures=tuple(sheet.figures),
        details={"rivals": {"real_tokens_per_s": {"ours": [600_000.0], "HF Trainer": [200_000.0]}}},
    )
    machine = StageResult(name="machine", status="measured", details={"gpus": [GPU]})
    memory = StageResult(name="memory", status="failed", reason="RuntimeError: <b>broken</b>\nand more")
    known = {one.name: one for one in (machine, train, memory)}
    others = (StageResult(name=stage.name, status="not measured", reason="cut off") for stage in STAGES)
    report = CheckReport(
        tool_version="0.1.0",
        started_utc="2026-01-01T00:00:00+00:00",
        device="h200",
        sizes="full",
        limit_s=540.0,
        finished=False,
        stages=tuple(known.get(one.name, one) for one in others),
    )
    return CheckReport.of(report.to_json() | {"bars": [bar.to_json() for bar in bars_of(report)]})
