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
from trainer.formats.canonical_json import canonical_sha256
from trainer.formats.manifest import read_manifest

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
"""Path of each name in the commands below."""
NAMES_OF_KINDS = {
    "dataset": "data",
    "trial log": "reports",
    "model config": "config",
}
"""Name in ``FILES`` of kinds that are called otherwise."""
COMMANDS = {
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
"""Weight of each kind of file. A model's configuration is rare, as it takes seconds: a
process loads torch for it."""


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
    tuned_hash = tomlkit.parse(tuned).unwrap()["fingerprint"]["dataset_hash"]
    tuned = tuned.replace(tuned_hash, read_manifest(place / "data").dataset_hash)
    (place / "profile.toml").write_text(tuned, encoding="utf-8")
    shutil.copytree(REPORTS, place / "reports" / "bert-mini-cpu")
    settings = (
        "--set train.max_steps=4 --set train.evaluation.interval_steps=2 --set"
        " train.seq_length_tokens=32"
    )
    train = (
        f"trainer {place}/profile.toml --data {place}/data --out {place}/run {settings}"
    )
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
    name = NAMES_OF_KINDS.get(kind, kind)
    root = place / FILES[name]
    files = [path for path in (root, *sorted(root.rglob("*"))) if path.is_file()]
    # No command reads a report.
    reports = {"report.html", "report.md", "report.json"}
    return [path.relative_to(place) for path in files if path.name not in reports]


def _sha256(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def mutate(content: bytes, suffix: str, draw: random.Random) -> bytes:
    """Return corrupt content of a file; at half of the draws still of its format."""
    if draw.random() < 0.5:
        with contextlib.suppress(
            ValueError, TypeError, KeyError, IndexError, OverflowError
        ):
            if suffix == ".json":
                return json.dumps(_changed(json.loads(content), draw)).encode()
            if suffix == ".toml":
                tables = tomlkit.parse(content.decode()).unwrap()
                # TOML has no null.
                changed = _without_none(_changed(tables, draw))
                return tomlkit.dumps(changed).encode()
            if suffix == ".jsonl":
                return _changed_line(content, draw)
            if suffix == ".npy":
                return _changed_array(content, draw)
    return _changed_bytes(content, draw)


def _changed(value: Any, draw: random.Random) -> Any:
    changed = copy.deepcopy(value)
    for _ in range(draw.choice([1, 1, 1, 2, 4])):
        positions = list(_positions(changed))
        if not positions:
            return draw.choice(VALUES)
        holder, key = draw.choice(positions)
        action = draw.choice(
            ["replace", "replace", "remove", "swap", "scale", "rename", "repeat"]
        )
        if action == "remove":
            del holder[key]
        elif action == "swap":
            other_holder, other_key = draw.choice(positions)
            other_value = copy.deepcopy(other_holder[other_key])
            value = copy.deepcopy(holder[key])
            holder[key] = other_value
            other_holder[other_key] = value
        elif action == "scale" and isinstance(holder[key], int | float):
            factor = draw.choice([-1, 0, 2, 1000, 10**12])
            offset = draw.choice([0, 1, -1])
            holder[key] = holder[key] * factor + offset
        elif action == "rename" and isinstance(holder, dict):
            value = holder.pop(key)
            holder[draw.choice(["", "x", f"{key}s", "a.b"])] = value
        elif action == "repeat" and isinstance(holder, list):
            holder.extend(copy.deepcopy([holder[key]] * draw.choice([1, 50])))
        else:
            holder[key] = copy.deepcopy(draw.choice(VALUES))
    return changed


def _positions(value: Any) -> Any:
    """Yield each position in nested tables and lists: its holder and its key."""
    items: Any = ()
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list):
        items = enumerate(value)
    for key, item in items:
        yield value, key
        yield from _positions(item)


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {
            key: _without_none(item) for key, item in value.items() if item is not None
        }
    if isinstance(value, list):
        return [_without_none(item) for item in value if item is not None]
    return value


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
    actions: list[Callable[[], Any]] = [
        lambda: array.astype(draw.choice(["float64", "int64", "uint8", ">u4"])),
        lambda: array[: draw.randrange(len(array) + 1)],
        lambda: np.sort(array)[::-1],
        lambda: array.reshape(1, -1),
        lambda: np.concatenate([array, array]),
        lambda: array * 0 - 1,
    ]
    action = draw.choice(actions)
    file = io.BytesIO()
    np.save(file, action())
    return file.getvalue()


def _changed_bytes(content: bytes, draw: random.Random) -> bytes:
    position = draw.randrange(len(content) + 1)
    lines = content.splitlines(keepends=True)
    draw.shuffle(lines)
    flipped = bytearray(content)
    for _ in range(min(len(content), draw.choice([1, 4, 64]))):
        flipped[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    number = str(draw.choice([-1, 2**64, "1e999"])).encode()
    inserted = [
        content[:position] + insertion + content[position:]
        for insertion in (b"\xff\xfe\x80", b"\0" * 100, number)
    ]
    nested = [b"[" * 5000, b'{"a":' * 5000 + b"1"]
    shuffled = b"".join(lines)
    recoded = content.decode(errors="replace").encode("utf-16")
    replaced = [
        b"",
        bytes(flipped),
        shuffled,
        content + content,
        draw.randbytes(draw.randrange(2000)),
        recoded,
    ]
    cut = [content[:position], content[position:]]
    return draw.choice([*cut, *inserted, *nested, *replaced])


def mutate_files(place: Path, points: int, seed: int) -> dict[str, Any]:
    """Read mutated files with the commands, and count their exit codes."""
    originals = place / "originals"
    write_originals(originals)
    draw = random.Random(seed)
    cases_by_exit_code = collections.Counter[int]()
    cases_by_kind = collections.Counter[str]()
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
            original_hash = _sha256(originals / target)
            mutated_hash = _sha256(work / target)
            manifest.write_bytes(
                manifest.read_bytes().replace(
                    original_hash.encode(), mutated_hash.encode()
                )
            )
        command = draw.choice(COMMANDS[kind])
        arguments = command.format(
            other=PROFILE, **{name: work / path for name, path in FILES.items()}
        ).split()
        try:
            with (
                contextlib.redirect_stdout(io.StringIO()),
                contextlib.redirect_stderr(io.StringIO()) as stderr,
            ):
                code = run(arguments)
            errors = stderr.getvalue()
        except Exception:  # noqa: BLE001 - the very thing that must not happen
            code = EXIT_BUG
            errors = traceback.format_exc()
        cases_by_exit_code[code] += 1
        cases_by_kind[kind] += 1
        if "Traceback" in errors or code == EXIT_BUG:
            tracebacks.append(
                f"case {number} of seed {seed}: {target}: autotune"
                f" {' '.join(arguments)}\n{errors}"
            )
    return {
        "cases": points,
        "seed": seed,
        "by_kind": dict(sorted(cases_by_kind.items())),
        "by_exit_code": {
            str(code): cases for code, cases in sorted(cases_by_exit_code.items())
        },
        "tracebacks": len(tracebacks),
        "first_tracebacks": tracebacks[:9],
    }
