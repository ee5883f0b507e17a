"""Import of your code in the process that trials are forked from."""

import json
import subprocess
import sys

import pytest

pytestmark = pytest.mark.system

POOL = """
import os, threading
ends = threading.Event()
pool = threading.Thread(target=ends.wait, daemon=True)
pool.start()
"""
ENDS_AT_A_FORK = "os.register_at_fork(before=lambda: (ends.set(), pool.join()))"
BUILD = "def build_step(micro_batch_size): ..."


@pytest.mark.parametrize(
    ("ending", "unsafe"),
    [(ENDS_AT_A_FORK, None), ("", "importing it starts threads (1)")],
)
def test_only_threads_surviving_forks_are_unsafe(tmp_path, ending, unsafe):
    # OpenBLAS ends its pool like this.
    (tmp_path / "mine.py").write_text(f"{POOL}\n{ending}\n{BUILD}\n")
    code = (
        "import json; from autotune.subjects.jobs.load import preload;"
        " print(json.dumps(preload({functions})))"
    )
    given = f"{{'step': 'mine:build_step'}}, (), {str(tmp_path)!r}, 60"
    words = [sys.executable, "-c", code.replace("{functions}", given)]
    process = subprocess.run(words, capture_output=True, text=True, check=True)
    assert json.loads(process.stdout.splitlines()[-1])["unsafe"] == unsafe
