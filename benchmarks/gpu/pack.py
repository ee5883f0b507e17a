"""``python -m benchmarks.gpu.pack --out DIR``: what the check needs on a machine without network, as files to carry.

Wheels of the packages that such a machine lacks, in the versions installed here, and a prepared dataset of this
machine's own programs. torch, transformers and what they cannot be without are taken to be there; name what else is
there with ``--has``, which spares what it needs as well. Then, from a checkout on that machine:

    python3 -m pip install --no-index --no-deps --target SITE DIR/wheels/*.whl
    PYTHONPATH=SITE python3 -m benchmarks.gpu.all --out RESULTS --data DIR/data

Needs network here, and the dataset needs the extra ``elf``.
"""

import argparse
import importlib.metadata
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

WANTED = (
    "accelerate", "matplotlib", "nvidia-ml-py", "optuna", "psutil", "pydantic", "rich", "tomlkit", "typer", "zlib-ng",
)  # fmt: skip
"""What the check imports beside torch and transformers."""
THERE = (
    "filelock", "fsspec", "huggingface-hub", "jinja2", "numpy", "packaging", "pyyaml", "regex", "safetensors",
    "tokenizers", "torch", "tqdm", "transformers",
)  # fmt: skip
"""torch, transformers, and what every version of them needs."""
PYTHON = "3.12"
PLATFORMS = (
    *(f"manylinux_2_{minor}_x86_64" for minor in (39, 35, 34, 31, 28, 27, 24, 17)),
    "manylinux2014_x86_64",
    "manylinux1_x86_64",
)
SAMPLES = 12_000
"""Functions of the dataset: a few MiB."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Fetch, prepare, and say what to do there."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.pack", description="Pack what the check needs.")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument("--python", default=PYTHON, metavar="X.Y", help=f"of that machine; default: {PYTHON}")
    parser.add_argument("--has", action="append", default=[], metavar="NAME", help="a package that is there; repeat")
    parser.add_argument("--programs", default="elf:/usr/bin", metavar="SOURCE", help="what the dataset is made of")
    parser.add_argument("--without-data", action="store_true", help="wheels alone")
    options = parser.parse_args(arguments)
    wheels = options.out / "wheels"
    names = lacking((*THERE, *options.has))
    fetched = subprocess.run(download_command(names, options.python, wheels), check=False)
    if fetched.returncode:
        sys.stderr.write("error: not all wheels could be fetched\n  next: see pip's message above, and run it again\n")
        return 1
    if not options.without_data and not (options.out / "data" / "manifest.json").is_file():
        prepare = ["-m", "autotune", "data", "prepare", options.programs, "--out", str(options.out / "data")]
        done = subprocess.run([sys.executable, *prepare, "--max-samples", str(SAMPLES)], check=False)
        if done.returncode:
            return done.returncode
    size = sum(path.stat().st_size for path in options.out.rglob("*") if path.is_file())
    print(f"packed: {options.out}, {size / 2**20:.1f} MiB; there, in a checkout of this project:")
    print(f"  python3 -m pip install --no-index --no-deps --target SITE {wheels}/*.whl")
    data = "" if options.without_data else f" --data {options.out / 'data'}"
    print(f"  PYTHONPATH=SITE python3 -m benchmarks.gpu.all --out RESULTS{data}")
    return 0


def lacking(there: Iterable[str]) -> list[str]:
    """Names of what is wanted and of all that needs, as the packages installed here say, up to what is there."""
    found: set[str] = set()
    known = {canonicalize_name(name) for name in there}
    open_ = [canonicalize_name(name) for name in WANTED]
    while open_:
        name = open_.pop()
        if name in found or name in known:
            continue
        found.add(name)
        for need in map(Requirement, importlib.metadata.requires(name) or []):
            if need.marker is None or need.marker.evaluate({"extra": ""}):
                open_.append(canonicalize_name(need.name))
    return sorted(found)


def download_command(names: Iterable[str], python: str, wheels: Path) -> list[str]:
    """How pip fetches wheels for another machine, in the versions that are installed here."""
    pinned = [f"{name}=={importlib.metadata.version(name)}" for name in names]
    platforms = [word for platform in PLATFORMS for word in ("--platform", platform)]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    command += ["--python-version", python, "--implementation", "cp", *platforms]
    return [*command, "--dest", str(wheels), *pinned]


if __name__ == "__main__":
    sys.exit(main())
