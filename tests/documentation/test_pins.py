"""The pinned versions exist for everybody, and a wheel works where it is installed."""

import os
import re
import subprocess
import sys
import tarfile
import tomllib
import venv
from pathlib import Path

import pytest

from tests.documentation.blocks import ROOT

PINS = (ROOT / "constraints.txt").read_text().split()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PYTHON_VERSIONS = [
    version
    for classifier in PROJECT["classifiers"]
    for version in re.findall(r"Python :: (3\.\d+)", classifier)
]
NO_ANSWER = re.compile(
    r"Temporary failure|Could not fetch URL|ConnectionError|timed out"
)


def environment_without_pip_settings() -> dict[str, str]:
    """Return an environment in which pip knows only its defaults.

    A proxy's certificate is no setting of what to install.
    """
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("PIP_") or name == "PIP_CERT"
    }
    return kept | {"PIP_CONFIG_FILE": os.devnull}


def test_no_pin_has_a_local_version():
    assert [pin for pin in PINS if not re.fullmatch(r"[\w.-]+==[\w.]+", pin)] == []


@pytest.mark.system
@pytest.mark.slow
def test_pins_resolve_for_the_lowest_python(tmp_path):
    # Debian 12 has 3.11.2, which some releases no longer support.
    lowest = PROJECT["requires-python"].removeprefix(">=") + ".0"
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--no-deps"]
    command += ["--ignore-installed", "--quiet", "--retries", "1"]
    command += ["--python-version", lowest, "--only-binary", ":all:"]
    command += ["--target", tmp_path]
    resolved = subprocess.run(
        [*command, "--requirement", ROOT / "constraints.txt"],
        env=environment_without_pip_settings(),
        capture_output=True,
        text=True,
        check=False,
    )
    if resolved.returncode and NO_ANSWER.search(resolved.stderr):
        pytest.skip(f"no package index answers: {resolved.stderr[-300:]}")
    assert resolved.returncode == 0, resolved.stderr


@pytest.mark.system
@pytest.mark.soak
@pytest.mark.parametrize("python_version", PYTHON_VERSIONS)
def test_dependencies_have_wheels_for_python(tmp_path, python_version):
    # Not among the slow tests: an index without metadata files makes pip download
    # torch's wheel of half a gigabyte.
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--quiet"]
    command += ["--target", str(tmp_path), "--ignore-installed", "--retries", "1"]
    command += ["--python-version", python_version, "--only-binary", ":all:"]
    command += ["--constraint", str(ROOT / "constraints.txt")]
    resolved = subprocess.run(
        [*command, *PROJECT["dependencies"]],
        env=environment_without_pip_settings(),
        capture_output=True,
        text=True,
        check=False,
    )
    if resolved.returncode and NO_ANSWER.search(resolved.stderr):
        pytest.skip(f"no package index answers: {resolved.stderr[-300:]}")
    assert resolved.returncode == 0, resolved.stderr


@pytest.mark.slow
def test_source_distribution_has_the_product_only(tmp_path):
    build = [sys.executable, "-m", "hatchling", "build", "-t", "sdist"]
    subprocess.run([*build, "-d", tmp_path], cwd=ROOT, check=True)
    (path,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = [Path(name).parts[1] for name in archive.getnames()]
    assert set(names) <= {
        "autotune",
        "trainer",
        "docs",
        "CHANGELOG.md",
        "LICENSE",
        "PKG-INFO",
        "README.md",
        "constraints.txt",
        "pyproject.toml",
        ".gitignore",
    }


@pytest.fixture(scope="module")
def installed_wheel(tmp_path_factory) -> Path:
    """Return the directory of programs of an environment with our wheel.

    It sees the installed dependencies of this one, but not the checkout.
    """
    directory = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    subprocess.run(
        [*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", directory, ROOT],
        check=True,
    )
    (wheel,) = directory.glob("*.whl")
    venv.create(directory / "venv")
    python = directory / "venv/bin/python"
    subprocess.run(
        [*pip, "--python", python, "install", "--no-deps", wheel], check=True
    )
    (site,) = (directory / "venv").glob("lib/python*/site-packages")
    ours = next(Path(path) for path in sys.path if path.endswith("site-packages"))
    # Without its .pth files, which would add the checkout.
    (site / "dependencies.pth").write_text(f"{ours}\n")
    return python.parent


@pytest.mark.system
@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    ["-h", "doctor", "estimate --model bert-mini --gpu h100-nvl-94gb --no-compile"],
)
def test_wheel_runs_beside_a_local_trainer(installed_wheel, tmp_path, command):
    (tmp_path / "trainer.py").write_text('raise RuntimeError("a local file")\n')
    environment = {
        name: value for name, value in os.environ.items() if name != "PYTHONPATH"
    }
    done = subprocess.run(
        [installed_wheel / "autotune", *command.split()],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    page = re.search(r"^Docs: (.+?)(#.*)?$", done.stdout, re.MULTILINE)
    if page is not None:
        assert Path(page[1]).is_file()
