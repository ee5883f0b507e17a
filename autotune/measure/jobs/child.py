"""The first thing that a trial's process runs: the job, and an account of how it ended."""

import importlib
import json
import resource
import traceback
from pathlib import Path
from typing import Any

import torch

from trainer.errors import TrainerError

# RuntimeErrors with these texts are allocators' refusals.
_REFUSALS = ("can't allocate memory", "bad_alloc", "out of memory", "could not create a memory object")


def run_job(job: str, measured: dict[str, Any], place: dict[str, Any], directory: Path) -> None:
    """Run a job and write ``result.json`` into the trial's directory."""
    try:
        figures = importlib.import_module(f"autotune.measure.jobs.{job}").run(measured, place)
        result = {"status": "measured", "figures": figures}
    except (torch.OutOfMemoryError, MemoryError) as error:
        result = {"status": "out_of_memory", "detail": _first_line(error)}
    except TrainerError as error:
        result = {"status": "refused", "message": error.message, "next_step": error.next_step}
    except Exception as error:  # noqa: BLE001 - the border of the process: every failure becomes an outcome
        refused = isinstance(error, RuntimeError) and any(text in str(error) for text in _REFUSALS)
        _lift_limit()
        detail = _first_line(error) if refused else traceback.format_exc()[-2000:]
        result = {"status": "out_of_memory" if refused else "crashed", "detail": detail}
    _lift_limit()
    partial = directory / "result.partial"
    partial.write_text(json.dumps(result))
    partial.replace(directory / "result.json")


def _lift_limit() -> None:
    """Writing the account needs memory too."""
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:500]
