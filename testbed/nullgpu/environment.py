"""The second environment: torch's CUDA build without NVIDIA's libraries.

The packages of this environment are beside it. ``python -m testbed.nullgpu.environment
[newest | lowest]`` makes it, in the repository.
"""

import json
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from testbed.nullgpu.build import build

ROOT = Path(__file__).parents[2]
CACHE = ROOT / ".cuda"
VERSIONS = Path(__file__).with_name("versions.toml")


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """A Python whose torch is a CUDA build, and the stubs that it is to load."""

    python: Path
    stubs: Path


def find(which: str = "newest") -> Environment | None:
    """Return an environment that was made from today's pins, or None."""
    versions = _versions()
    folder = ROOT / versions[which]["folder"]
    stamp = folder / ".made"
    torch = folder / f"lib/python{sysconfig.get_python_version()}/site-packages/torch"
    if (
        not torch.exists()
        or not stamp.exists()
        or stamp.read_text() != _wanted(versions, which)
    ):
        return None
    stubs = build(torch, _include(), CACHE)
    return Environment(python=folder / "bin/python", stubs=stubs)


def make(which: str = "newest") -> Environment:
    """Make an environment unless there is one."""
    if environment := find(which):
        return environment
    versions = _versions()
    folder = ROOT / versions[which]["folder"]
    if folder.is_symlink():
        # To clear it would empty the environment of another checkout.
        raise SystemExit(f"error: {folder} is a link; next: remove it")
    _call(sys.executable, "-m", "venv", "--without-pip", "--clear", folder)
    # No dependencies: torch looks for NVIDIA's libraries beside itself before
    # LD_LIBRARY_PATH.
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet")
    _call(
        *pip,
        "--python",
        folder / "bin/python",
        "install",
        "--no-deps",
        "--no-compile",
        *versions[which]["packages"],
    )
    site = next(folder.glob("lib/python*/site-packages"))
    if "cuda: Optional[str] = '13." not in (site / "torch/version.py").read_text():
        raise SystemExit(
            "error: pip found a torch without CUDA 13; next: remove indexes of CPU"
            " builds from its configuration (pip config list)"
        )
    shared = sysconfig.get_paths()["purelib"]
    (site / "shared.pth").write_text(f"import site; site.addsitedir({shared!r})\n")
    if not _include().exists():
        wheels = CACHE / "wheels"
        _call(*pip, "download", "--no-deps", "--dest", wheels, *versions["headers"])
        for wheel in wheels.glob("*.whl"):
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(
                    CACHE / "headers",
                    [name for name in archive.namelist() if "/include/" in name],
                )
    (folder / ".made").write_text(_wanted(versions, which))
    made = find(which)
    assert made is not None
    return made


def _versions() -> dict[str, Any]:
    return tomllib.loads(VERSIONS.read_text())


def _wanted(versions: dict[str, Any], which: str) -> str:
    return json.dumps([versions[which], versions["headers"], sys.prefix])


def _include() -> Path:
    return CACHE / "headers/nvidia/cu13/include"


def _call(*command: str | Path) -> None:
    subprocess.run([str(word) for word in command], check=True)


if __name__ == "__main__":
    make(*sys.argv[1:])
