from collections.abc import Callable
from pathlib import Path

import pytest

SRUN = """
for word; do
    case $word in --*) shift ;; *) break ;; esac
done
exec "$@"
"""


@pytest.fixture
def put(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], Path]:
    """Return a function that puts a bash script of a given name first on PATH."""
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")

    def write(name: str, body: str) -> Path:
        path = tmp_path / "bin" / name
        path.write_text(f"#!/bin/bash\n{body}\n")
        path.chmod(0o755)
        return path

    return write
