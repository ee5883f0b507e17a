"""``python -m benchmarks.gpu.keep DIR``: put what a check found into ``reports/gpu/GPU/DATE``, and write the documents.

What ``autotune tune`` wrote is unpacked beside it, so that reports open and profiles read as everywhere else. A check
of tiny sizes, which tries the check itself, is refused: it says nothing of a device.
"""

import argparse
import json
import shutil
import sys
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from autotune.decide.physical import GpuRate, check_rates, check_real, least_flops_per_token
from autotune.errors import AutotuneError
from benchmarks import document
from benchmarks.gpu.all import PAGE_NAME, REPORT_NAME
from benchmarks.gpu.check.page import check_page
from benchmarks.gpu.check.results import CheckReport
from benchmarks.gpu.check.rig import LEDGER_NAME
from benchmarks.gpu.stage.tuning import ARCHIVE_NAME
from trainer.config import TrainConfig
from trainer.presets import PRESETS, model_settings

KEPT = Path(__file__).parents[2] / "reports" / "gpu"
EXIT_BAD_INPUT = 2
CPU = "cpu"
"""What a check without a GPU calls its device."""
_TOKENS = "_real_tokens_per_s"


def main(arguments: Sequence[str] | None = None) -> int:
    """Keep a check, and say where."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.keep", description="Keep what a check found.")
    parser.add_argument("found", type=Path, metavar="DIR", help="what --out named")
    options = parser.parse_args(arguments)
    try:
        place = keep(options.found, KEPT)
    except (OSError, ValueError, KeyError, TypeError) as error:
        again = f"python -m benchmarks.gpu.all --device cuda --out {options.found}"
        sys.stderr.write(f"error: {error}\n  next: where there is a GPU, {again}\n")
        return EXIT_BAD_INPUT
    print(f"kept: {place}")
    return document.main()


def keep(found: Path, kept: Path) -> Path:
    """Copy a check, and unpack what came with it.

    Args:
        found: Directory of the check.
        kept: Where checks are kept, by GPU and date; one of the same day is replaced.

    Raises:
        ValueError: If it is of tiny sizes, of another version, of a pretended GPU, or says what its GPU cannot do.
        OSError: If it cannot be read.
    """
    report = CheckReport.of(json.loads((found / REPORT_NAME).read_text()))
    if report.sizes == "tiny":
        raise ValueError(f"{found} tried the check itself: its sizes are tiny, and it says nothing of a device")
    check_possible(report)
    place = kept / report.device / report.started_utc[:10]
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    for name in (REPORT_NAME, LEDGER_NAME):
        if (found / name).is_file():
            shutil.copyfile(found / name, place / name)
    # Written anew, as the page may say more by now than when it was measured.
    (place / PAGE_NAME).write_text(check_page(report), encoding="utf-8")
    if (found / ARCHIVE_NAME).is_file():
        with zipfile.ZipFile(found / ARCHIVE_NAME) as packed:
            packed.extractall(place / "tune")
    return place


def check_possible(report: CheckReport) -> None:
    """Reject a check of a pretended GPU or of one that it does not name, and rates that its GPU cannot reach.

    Raises:
        ValueError: With the GPU, the rate and the limit.
    """
    found = report.stage("machine").details.get("gpus") or [{}]
    facts = found[0].get("facts", {})
    name = facts.get("name")
    try:
        for driver in (facts.get("driver"), *(stage.made_with.get("driver") for stage in report.stages)):
            check_real(name or report.device, driver, "this check")
        if report.device != CPU and name is None:
            raise ValueError(f"the check of {report.device} does not name its GPU: stage 'machine' found none")
        check_rates(name, _rates(report))
    except AutotuneError as error:
        raise ValueError(error.message) from error


def _rates(report: CheckReport) -> Iterator[GpuRate]:
    for stage in report.stages:
        for figure in stage.figures:
            what = f"{stage.name}, {figure.name}"
            if figure.value is None or figure.label != "measured":
                continue
            if figure.name.endswith("_flops_per_s"):
                yield GpuRate(what=what, per_s=figure.value, of="tf32" if "fp32" in figure.name else "bf16")
            if figure.name == "copy_read_plus_write_bytes_per_s":
                yield GpuRate(what=what, per_s=figure.value, of="memory")
            if figure.name.endswith("link_bytes_per_s"):
                yield GpuRate(what=what, per_s=figure.value, of="links")
            model = figure.name.removesuffix(_TOKENS).replace("_", "-")
            if figure.name.endswith(_TOKENS) and model in PRESETS:
                least = least_flops_per_token(TrainConfig(model=model_settings(model)), None)
                yield GpuRate(what=what, per_s=least * figure.value)
            if "_mfu_" in figure.name and figure.value > 1:
                raise ValueError(f"{what}: {figure.value:.3g} of the GPU's peak, and no GPU does more than 1")


if __name__ == "__main__":
    sys.exit(main())
