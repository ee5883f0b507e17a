"""Commands read corrupt and hostile files, and none ends in a traceback.

Half of the mutations know the structure of a file: a JSON, TOML or NPY file whose
values change in kind, size or sign, whose keys go or swap, and whose checksums are
corrected afterwards, so that what lies behind the checksum is reached. The others
change its bytes.
"""

import collections
import contextlib
import copy
import hashlib
import io
import json
import random
import shutil
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import tomlkit

from autotune.cli import run
from testbed.programs import run_program
from trainer.config.tables import canonical_sha256
from trainer.data.dataset import read_manifest

EXIT_BUG = 70
ROOT = Path(__file__).parents[3]
PROFILE = ROOT / "profiles" / "bert-mini-cpu.toml"
REPORTS = ROOT / "reports" / "bert-mini-cpu"
VALUES = [
    None,
    True,
    -1,
    0,
    1,
    2**31,
    2**63,
    2**64 + 1,
    -0.5,
    1e308,
    1e-308,
    float("nan"),
    float("inf"),
    "",
    "a",
    "a" * 5000,
    "\x1b[31m\0\u202e",
    "../../etc/passwd",
    "/dev/zero",
    "1970-01-01",
    [],
    [[]],
    {},
    {"a": {"b": []}},
]
FILES = {
    "profile": "profile.toml",
    "data": "data",
    "site": "site.toml",
    "run": "run",
    "reports": "reports",
    "out": "out",
    "config": "config.json",
    "tokenizer": "tokenizer.json",
    "text": "text.txt",
    "whole_run": "../originals/run",
}
"""What the commands' arguments below stand for."""
READ = {
    "profile": [
        "profile show {profile}",
        "profile show {profile} --explain",
        "profile verify {profile} --data {data}",
        "profile show {profile} --json",
        "compare {profile} {other}",
        "advise {profile}",
        "plan {profile} --duration 3h",
        "profile export {profile} --to hf-trainer",
        "train {profile} --slurm={site} --dry-run --data {data}",
        "report {profile} --out {out}/report.html",
        "profile approve {profile} --by me --reports {reports}",
    ],
    "trial log": [
        "report {profile} --reports {reports} --out {out}/report.html",
        "advise {profile} --reports {reports}",
        "compare {reports}/bert-mini-cpu {reports}/bert-mini-cpu",
        "status --reports {reports}",
    ],
    "run": [
        "advise {run}",
        "advise {run} {profile} --json",
        "status {run}",
        "compare {run} {whole_run} --json",
        "report {profile} --run {run} --out {out}/report.html",
    ],
    "dataset": [
        "data inspect {data}",
        "data verify {data}",
        "compare {data} {data}",
        "data stage {data} --to {out}/disk",
        "advise {data}",
        "plan {profile} --epochs 1 --data {data}",
        "data inspect {data} --json",
    ],
    "site": [
        "train {profile} --slurm={site} --dry-run --data {data}",
        "workers {profile} --slurm {site} --dry-run",
    ],
    "model config": ["estimate --model {config} --device cpu --memory 1GiB"],
    "tokenizer": [
        "data prepare text:{text} --tokenizer {tokenizer} --out {out}/prepared"
        " --workers 1"
    ],
}
SHARES = {
    "profile": 30,
    "trial log": 14,
    "run": 20,
    "dataset": 24,
    "site": 10,
    "model config": 1,
    "tokenizer": 1,
}
"""How often each kind is read. A model's configuration takes seconds, as a process
loads torch for it."""


def write_originals(place: Path) -> None:
    """Write intact files of every kind by the commands themselves."""
    place.mkdir(parents=True)
    lines = [f"line {number} of a log: error {number % 7}\n" for number in range(600)]
    (place / "text.txt").write_text("".join(lines))
    prepare = (
        f"autotune data prepare text:{place}/text.txt --out {place}/data"
        " --vocab-size 256"
    )
    run_program([sys.executable, "-m", *prepare.split()], cwd=ROOT)
    tuned = PROFILE.read_text(encoding="utf-8")
    of_another = tomlkit.parse(tuned).unwrap()["fingerprint"]["dataset_hash"]
    tuned = tuned.replace(of_another, read_manifest(place / "data").dataset_hash)
    (place / "profile.toml").write_text(tuned, encoding="utf-8")
    shutil.copytree(REPORTS, place / "reports" / "bert-mini-cpu")
    few = (
        "--set train.max_steps=4 --set train.evaluation.interval_steps=2 --set"
        " train.seq_length_tokens=32"
    )
    train = f"trainer {place}/profile.toml --data {place}/data --out {place}/run {few}"
    run_program([sys.executable, "-m", *train.split()], cwd=ROOT)
    shutil.rmtree(place / "run" / "checkpoints", ignore_errors=True)
    (place / "site.toml").write_text(
        'schema_version = 1\naccount = "us"\npartition = "gpu"\nprologue = ["module'
        ' load cuda"]\n'
    )
    shutil.copy(ROOT / "docs/assets/modernbert-tiny/config.json", place)
    shutil.copy(place / "data" / "tokenizer.json", place)


def targets(place: Path, kind: str) -> list[Path]:
    """Return the files of a kind, relative to the place."""
    under = (
        place
        / FILES[
            {"dataset": "data", "trial log": "reports", "model config": "config"}.get(
                kind, kind
            )
        ]
    )
    files = [path for path in (under, *sorted(under.rglob("*"))) if path.is_file()]
    written = {"report.html", "report.md", "report.json"}  # which no command reads
    return [path.relative_to(place) for path in files if path.name not in written]


def mutate(content: bytes, suffix: str, draw: random.Random) -> bytes:
    """Return corrupt content of a file; at half of the draws still of its format."""
    if draw.random() < 0.5:
        with contextlib.suppress(
            ValueError, TypeError, KeyError, IndexError, OverflowError
        ):
            if suffix == ".json":
                return json.dumps(_changed(json.loads(content), draw)).encode()
            if suffix == ".toml":
                return tomlkit.dumps(
                    _without_none(
                        _changed(tomlkit.parse(content.decode()).unwrap(), draw)
                    )
                ).encode()
            if suffix == ".jsonl":
                return _changed_line(content, draw)
            if suffix == ".npy":
                return _changed_array(content, draw)
    return _changed_bytes(content, draw)


def _changed(value: Any, draw: random.Random) -> Any:
    changed = copy.deepcopy(value)
    for _ in range(draw.choice([1, 1, 1, 2, 4])):
        places = list(_places(changed))
        if not places:
            return draw.choice(VALUES)
        holder, key = draw.choice(places)
        deed = draw.choice(
            ["replace", "replace", "remove", "swap", "scale", "rename", "repeat"]
        )
        if deed == "remove":
            del holder[key]
        elif deed == "swap":
            other, beside = draw.choice(places)
            holder[key], other[beside] = (
                copy.deepcopy(other[beside]),
                copy.deepcopy(holder[key]),
            )
        elif deed == "scale" and isinstance(holder[key], int | float):
            holder[key] = holder[key] * draw.choice(
                [-1, 0, 2, 1000, 10**12]
            ) + draw.choice([0, 1, -1])
        elif deed == "rename" and isinstance(holder, dict):
            holder[draw.choice(["", "x", f"{key}s", "a.b"])] = holder.pop(key)
        elif deed == "repeat" and isinstance(holder, list):
            holder.extend(copy.deepcopy([holder[key]] * draw.choice([1, 50])))
        else:
            holder[key] = copy.deepcopy(draw.choice(VALUES))
    return changed


def _places(value: Any) -> Any:
    inside = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    for key, one in inside:
        yield value, key
        yield from _places(one)


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {
            key: _without_none(one) for key, one in value.items() if one is not None
        }
    return (
        [_without_none(one) for one in value if one is not None]
        if isinstance(value, list)
        else value
    )


def _changed_line(content: bytes, draw: random.Random) -> bytes:
    lines = content.splitlines(keepends=True)
    number = draw.randrange(len(lines))
    row = _changed(json.loads(lines[number]), draw)
    # A record of a trial log carries its checksum.
    if isinstance(row, dict) and "sha256" in row:
        row["sha256"] = canonical_sha256(row.get("record"))
    lines[number] = json.dumps(row).encode() + b"\n"
    return b"".join(lines)


def _changed_array(content: bytes, draw: random.Random) -> bytes:
    array = np.load(io.BytesIO(content)).copy()
    deeds: list[Callable[[], Any]] = [
        lambda: array.astype(draw.choice(["float64", "int64", "uint8", ">u4"])),
        lambda: array[: draw.randrange(len(array) + 1)],
        lambda: np.sort(array)[::-1],
        lambda: array.reshape(1, -1),
        lambda: np.concatenate([array, array]),
        lambda: array * 0 - 1,
    ]
    written = io.BytesIO()
    np.save(written, draw.choice(deeds)())
    return written.getvalue()


def _changed_bytes(content: bytes, draw: random.Random) -> bytes:
    at = draw.randrange(len(content) + 1)
    lines = content.splitlines(keepends=True)
    draw.shuffle(lines)
    flipped = bytearray(content)
    for _ in range(min(len(content), draw.choice([1, 4, 64]))):
        flipped[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    number = str(draw.choice([-1, 2**64, "1e999"])).encode()
    inserted = [
        content[:at] + one + content[at:]
        for one in (b"\xff\xfe\x80", b"\0" * 100, number)
    ]
    nested = [b"[" * 5000, b'{"a":' * 5000 + b"1"]
    shuffled, recoded = (
        b"".join(lines),
        content.decode(errors="replace").encode("utf-16"),
    )
    whole = [
        b"",
        bytes(flipped),
        shuffled,
        content + content,
        draw.randbytes(draw.randrange(2000)),
        recoded,
    ]
    return draw.choice([content[:at], content[at:], *inserted, *nested, *whole])


def mutate_files(place: Path, points: int, seed: int) -> dict[str, Any]:
    """Read so many mutated files with the commands, and count how they ended."""
    originals = place / "originals"
    write_originals(originals)
    draw = random.Random(seed)
    ends, kinds = collections.Counter[int](), collections.Counter[str]()
    tracebacks: list[str] = []
    work = place / "work"
    for number in range(points):
        kind = draw.choices(list(SHARES), weights=list(SHARES.values()))[0]
        target = draw.choice(targets(originals, kind))
        shutil.rmtree(work, ignore_errors=True)
        shutil.copytree(originals, work)
        (work / "out").mkdir()
        (work / target).write_bytes(
            mutate((work / target).read_bytes(), target.suffix, draw)
        )
        if kind == "dataset" and draw.random() < 0.7:
            # The manifest names the SHA-256 of the changed file instead of the original
            # one's.
            manifest = work / "data" / "manifest.json"
            before, after = (
                hashlib.sha256((of / target).read_bytes()).hexdigest()
                for of in (originals, work)
            )
            manifest.write_bytes(
                manifest.read_bytes().replace(before.encode(), after.encode())
            )
        command = draw.choice(READ[kind])
        arguments = command.format(
            other=PROFILE, **{name: work / path for name, path in FILES.items()}
        ).split()
        try:
            with (
                contextlib.redirect_stdout(io.StringIO()),
                contextlib.redirect_stderr(io.StringIO()) as said,
            ):
                code = run(arguments)
            why = said.getvalue()
        except Exception:  # noqa: BLE001 - the very thing that must not happen
            code, why = EXIT_BUG, traceback.format_exc()
        ends[code] += 1
        kinds[kind] += 1
        if "Traceback" in why or code == EXIT_BUG:
            tracebacks.append(
                f"case {number} of seed {seed}: {target}: autotune"
                f" {' '.join(arguments)}\n{why}"
            )
    return {
        "cases": points,
        "seed": seed,
        "by_kind": dict(sorted(kinds.items())),
        "by_exit_code": {str(code): ends[code] for code in sorted(ends)},
        "tracebacks": len(tracebacks),
        "first_tracebacks": tracebacks[:9],
    }
