"""Run stages, each within its time, and keep each result as soon as it is there."""

import contextlib
import functools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import autotune
from autotune.base.files import write_atomically
from autotune.base.process import end_with_parent
from autotune.base.readable_json import readable_json
from autotune.errors import AutotuneError
from autotune.machine.measured_device import MeasuredDevice
from benchmarks.gpu.figures import training_rate
from benchmarks.gpu.queue import GpuMachine, LeftOut, Queue
from benchmarks.gpu.results import (
    CHECK_NAME,
    CUT_OFF,
    ENDED,
    FAILED,
    ROOT,
    Known,
    code_digest,
)
from benchmarks.gpu.stage import LOGS, Stage, fill
from trainer.formats.manifest import read_manifest

_POLL_S, _TAIL_LINES = 0.1, 12


def libraries_of(site: MeasuredDevice, data: Path) -> dict[str, str | None]:
    """Return the dataset and versions that results depend on."""
    return {
        "dataset": read_manifest(data).dataset_hash,
        "torch": site.versions.get("torch"),
        "transformers": site.versions.get("transformers"),
    }


def open_check(folder: Path, site: MeasuredDevice, *, tiny: bool) -> dict[str, Any]:
    """Continue the check in a directory, or begin one.

    Raises:
        AutotuneError: If the directory holds a check of other GPUs or sizes.
    """
    assert site.gpu is not None
    made_with = {
        "gpu": site.gpu.name,
        "gpus": len(site.gpus),
        "driver": site.gpu.driver,
        "torch": site.versions.get("torch"),
        "transformers": site.versions.get("transformers"),
        "tiny": tiny,
    }
    if (folder / CHECK_NAME).is_file():
        check: dict[str, Any] = json.loads((folder / CHECK_NAME).read_text())
        for name in ("gpu", "gpus", "tiny"):
            if check["made_with"][name] != made_with[name]:
                raise AutotuneError(
                    f"{folder / CHECK_NAME} was measured with another {name}",
                    next_step="Choose another --out.",
                )
    else:
        check = {
            "name": site.name,
            "tool_version": autotune.__version__,
            "started_utc": _now_utc(),
            "proofs": [],
            "references": [],
            "stages": {},
        }
    # Of any call: a simulator of a GPU is known by its environment.
    pretended = {name for name in os.environ if name.startswith("NULLGPU_")} | set(
        check.get("pretended_by", ())
    )
    return check | {"made_with": made_with, "pretended_by": sorted(pretended)}


@dataclass(slots=True, kw_only=True)
class Call:
    """One call that runs stages of the queue."""

    check: dict[str, Any]
    folder: Path
    """Directory of the check."""
    end_s: float
    """Time at which the call ends, on the monotonic clock."""
    libraries: Mapping[str, str | None]
    began_utc: str

    def run(self, queue: Queue, machine: GpuMachine) -> list[LeftOut]:
        """Run what is next in the queue, and return what is left out."""
        self._bring(queue, machine)
        return queue.walk(
            machine,
            left_s=lambda: self.end_s - time.monotonic(),
            exists=lambda path: (self.folder / path).exists(),
            run=functools.partial(self._run_and_keep, machine),
        )

    def _bring(self, queue: Queue, machine: GpuMachine) -> None:
        """Copy files of kept checks that stages read, unless they are there."""
        for source, target in files_to_bring(
            queue.stages, queue.known, machine.name, self.folder
        ):
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, target)

    def _run_and_keep(self, machine: GpuMachine, stage: Stage) -> bool:
        limit_s = min(stage.most_s, self.end_s - time.monotonic())
        sys.stderr.write(f"{stage.name}: at most {limit_s:.0f} s\n")
        result = run_stage(stage, self.folder, limit_s, machine.name)
        result["call"] = self.began_utc
        result["made_with"] = {
            "code": code_digest(stage.code),
            "driver": self.check["made_with"]["driver"],
            **self.libraries,
        }
        if stage.every_call:
            self.check["proofs"].append(result)
        if result["status"] == ENDED and stage.is_training:
            rate = training_rate(self.folder / str(stage.writes))
            reference = {"stage": stage.name, "tokens_per_s": rate}
            self.check["references"].append({"call": self.began_utc, **reference})
        self.check["stages"][stage.name] = result
        write_atomically(self.folder / CHECK_NAME, readable_json(self.check))
        said = (result["said"] or "").splitlines()
        ending = f" ({said[-1]})" if said else ""
        sys.stderr.write(
            f"{stage.name}: {result['status']} after {result['seconds']:.0f} s"
            f"{ending}\n"
        )
        return bool(result["status"] == ENDED)


def files_to_bring(
    stages: Sequence[Stage],
    known: Mapping[str, Known],
    gpu: str,
    folder: Path,
) -> Iterator[tuple[Path, Path]]:
    """Yield each file of a kept check that a stage reads, and where it belongs.

    Files that are there already are left out.
    """
    for stage in stages:
        if stage.writes is None or stage.name not in known:
            continue
        path = fill(stage.writes, gpu=gpu)
        source, target = known[stage.name].directory / path, folder / path
        if source.is_file() and not target.exists():
            yield source, target


def run_stage(stage: Stage, folder: Path, limit_s: float, gpu: str) -> dict[str, Any]:
    """Run one command within its time; nothing that it started outlives it.

    Args:
        stage: The stage.
        folder: Directory in which it runs.
        limit_s: Its time in seconds.
        gpu: Short name of the GPU.
    """
    if stage.from_scratch is not None:
        shutil.rmtree(folder / fill(stage.from_scratch, gpu=gpu), ignore_errors=True)
    measuring_s = stage.measuring_share * limit_s
    values = {
        "gpu": gpu,
        "minutes": f"{max(0.1, measuring_s / 60):.2f}",
        "seconds": f"{max(1.0, measuring_s):.0f}",
    }
    words = [fill(word, **values) for word in stage.words]
    (folder / LOGS).mkdir(parents=True, exist_ok=True)
    output_file = folder / LOGS / f"{stage.name}.json"
    log_file = folder / LOGS / f"{stage.name}.log"
    began_s, began_utc = time.monotonic(), _now_utc()
    with output_file.open("w") as stdout, log_file.open("w") as stderr:
        process = subprocess.Popen(
            [sys.executable, *words],
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,
            preexec_fn=functools.partial(end_with_parent, os.getpid()),  # noqa: PLW1509 - two system calls, no locks
            env=_environment(),
        )
        try:
            cut_off = not _ends_within(
                process, max(limit_s - stage.ending_s, limit_s / 2)
            )
        finally:
            if not _ends_within(process, 0.0):
                process.terminate()
                _ends_within(process, min(stage.ending_s, limit_s / 2))
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if cut_off:
        status = CUT_OFF
    else:
        status = ENDED if process.returncode in stage.exit_codes else FAILED
    answer, said = "", None
    if status == ENDED:
        answer_file = folder / stage.answer if stage.answer else output_file
        answer = _without_paths(answer_file.read_text(), folder)
    else:
        lines = log_file.read_text(errors="replace").splitlines()[-_TAIL_LINES:]
        text = "\n".join([f"exit code {process.returncode}", *lines])
        said = _without_paths(text, folder)
    return {
        "status": status,
        "words": list(stage.words),
        "command": ["python", *words],
        "began_utc": began_utc,
        "seconds": round(time.monotonic() - began_s, 1),
        "answer": _parsed(answer),
        "said": said,
    }


def _environment() -> dict[str, str]:
    """Return the environment of a stage, which finds this repository's modules."""
    paths = [str(ROOT), str(ROOT / "examples"), os.environ.get("PYTHONPATH", "")]
    python_path = os.pathsep.join(path for path in paths if path)
    return os.environ | {"PYTHONPATH": python_path, "PYTHONUNBUFFERED": "1"}


def _now_utc() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _parsed(answer: str) -> Any:
    """Return None for text that is not JSON: a training prints none."""
    try:
        return json.loads(answer)
    except ValueError:
        return None


def _ends_within(process: "subprocess.Popen[bytes]", seconds: float) -> bool:
    """Wait for a process's end without reaping it.

    So no other process gets its number before its group is killed.
    """
    end_s = time.monotonic() + seconds
    while (
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is None
    ):
        if time.monotonic() >= end_s:
            return False
        time.sleep(_POLL_S)
    return True


def _without_paths(text: str, folder: Path) -> str:
    """Remove this machine's paths and the GPUs' serial ids: results are passed on."""
    text = re.sub(r"GPU-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", "GPU", text)
    for directory, name in (
        (folder, "."),
        (folder.parent, ".."),
        (ROOT, "."),
        (Path(sys.prefix), "python"),
        (Path.home(), "~"),
    ):
        text = text.replace(str(directory), name) if len(directory.parts) > 1 else text
    return text
