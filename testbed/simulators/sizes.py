"""Advice that promises storage, followed for real."""

import itertools
import json
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from autotune.advice.decide.context import TrainingContext
from autotune.advice.decide.rules import advise
from autotune.advice.read_context import data_facts
from autotune.machine.host import SystemHost
from testbed.programs import run_program

PROGRAMS, PROGRAM_BYTES = Path("/usr/bin"), 60 * 2**20
TEXTS = Path("/usr/share/common-licenses")
TIMEOUT_S = 600


def followed(scratch: Path) -> list[dict[str, Any]]:
    """Raw data of two kinds turned into token ids."""
    return [
        _raw(scratch, "elf", _programs(scratch)),
        _raw(scratch, "text", _texts(scratch)),
    ]


def _raw(scratch: Path, kind: str, raw: Path) -> dict[str, Any]:
    facts = data_facts(raw, SystemHost())
    (advice,) = (
        recommendation
        for recommendation in advise(TrainingContext(train=None, data=facts))
        if recommendation.rule == "tokenise-ahead"
    )
    assert advice.gain is not None
    out = scratch / f"{kind}-ids"
    command = [
        sys.executable,
        "-m",
        "autotune",
        "data",
        "prepare",
        f"{kind}:{raw}",
        "--out",
        str(out),
        "--json",
    ]
    run_program(command, timeout_s=TIMEOUT_S)
    source = json.loads((out / "manifest.json").read_text())["source"]
    return _row(
        "tokenise-ahead",
        advice.gain.ratio,
        advice.gain.low,
        advice.gain.high,
        source["token_bytes"] / source["raw_bytes"],
    )


def _row(
    rule: str, promised: float, low: float | None, high: float | None, delivered: float
) -> dict[str, Any]:
    kept = (low or 0.0) <= delivered <= (high or float("inf"))
    return {
        "rule": rule,
        "promised": promised,
        "low": low,
        "high": high,
        "delivered": delivered,
        "kept": kept,
    }


def _programs(scratch: Path) -> Path:
    """Programs of this machine, until there are enough bytes."""
    place = scratch / "programs"
    place.mkdir()
    total = 0
    for path in _files(PROGRAMS):
        if path.is_symlink() or path.read_bytes()[:4] != b"\x7fELF":
            continue
        shutil.copy(path, place / path.name)
        total += path.stat().st_size
        if total > PROGRAM_BYTES:
            break
    return place


def _texts(scratch: Path) -> Path:
    """Texts of licences, and of this project's interpreter."""
    place = scratch / "texts"
    place.mkdir()
    library = Path(os.__file__).parent
    for number, path in enumerate(
        itertools.islice((*_files(TEXTS), *_files(library, "*.py")), 150)
    ):
        if path.is_file():
            shutil.copy(path, place / f"{number:03d}.txt")
    return place


def _files(directory: Path, pattern: str = "*") -> Iterator[Path]:
    yield from (path for path in sorted(directory.glob(pattern)) if path.is_file())
