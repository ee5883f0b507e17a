"""Contents of memory that the step job records, for real training code."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from autotune.base import document as doc
from autotune.base.render_console import console_text
from autotune.base.render_html import report_html
from autotune.base.render_markdown import markdown_text
from autotune.evidence.peak_contents import (
    ContentKind,
    LargeAllocation,
    ModuleContents,
    PeakContents,
    RefusedAllocation,
)
from autotune.memory.sections import peak_contents_section

pytestmark = pytest.mark.system
ROOT = Path(__file__).parents[3]
EXAMPLES = ROOT / "examples"
TAKE_STEPS = """
import json
import sys

from autotune.memory.jobs import step
from autotune.memory.values import StepRequest

request = StepRequest(
    function=sys.argv[1],
    arguments={"micro_batch_size": int(sys.argv[3])},
    size=int(sys.argv[3]),
    units_per_size=1.0,
    source_sha256="",
    device="cpu",
    memory_budget_bytes=int(sys.argv[4]) or None,
    warmup_steps=1,
    timed_steps=2,
    attribute=True,
)
local = {"directory": sys.argv[2], "limit_s": 600}
print(json.dumps(step.run(request.model_dump(mode="json"), local)["contents"]))
"""
PLAIN_LOOP = """
import torch

def build_step(micro_batch_size, device):
    model = torch.nn.Sequential(
        torch.nn.Linear(256, 256), torch.nn.Tanh(), torch.nn.Linear(256, 256)
    )
    optimizer = torch.optim.AdamW(model.parameters())
    batch = torch.ones(micro_batch_size, 256)

    def step():
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step
"""


def contents_of(function, directory, size=4, budget_bytes=0) -> PeakContents:
    words = (function, str(directory), str(size), str(budget_bytes))
    ended = subprocess.run(
        [sys.executable, "-c", TAKE_STEPS, *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    return PeakContents.model_validate(json.loads(ended.stdout.splitlines()[-1]))


def check_adam(contents):
    """Check that there are two states for each parameter, and that bytes add up."""
    by_kind = contents.bytes_by_kind
    state_bytes = by_kind[ContentKind.OPTIMIZER_STATE]
    # Batch normalisation has buffers, which an optimizer does not train.
    assert state_bytes == pytest.approx(2 * by_kind[ContentKind.PARAMETERS], rel=0.01)
    assert sum(by_kind.values()) == contents.peak_bytes
    assert by_kind[ContentKind.ACTIVATIONS] > 0


@pytest.mark.parametrize("name", [path.stem for path in sorted(EXAMPLES.glob("*.py"))])
def test_example_of_a_library_is_attributed(name):
    contents = contents_of(f"{name}:build_step", EXAMPLES)
    check_adam(contents)
    assert contents.phase == "backward"


def test_plain_loop_is_attributed(tmp_path):
    (tmp_path / "mine.py").write_text(PLAIN_LOOP)
    contents = contents_of("mine:build_step", tmp_path, size=512)
    check_adam(contents)
    tanh = next(row for row in contents.rows if row.module == "1")
    assert tanh.bytes_of(ContentKind.ACTIVATIONS) == 4 * 512 * 256


def test_out_of_memory_of_a_trial_is_explained(tmp_path):
    (tmp_path / "mine.py").write_text(PLAIN_LOOP)
    contents = contents_of("mine:build_step", tmp_path, 2**20, 2 * 2**30)
    # The result of the first linear layer is one too many.
    assert contents.refused.module == "0"
    assert contents.refused.operator == "addmm"
    assert contents.refused.size_bytes == 4 * 2**20 * 256
    assert contents.phase == "forward"
    batch_bytes = 4 * 2**20 * 256
    assert contents.bytes_by_kind[ContentKind.INPUTS] == batch_bytes
    assert contents.peak_bytes < 2 * 2**30


def page(blocks):
    section = doc.Section(title="Memory", key="memory", blocks=blocks)
    return report_html(doc.Document(title="Report", subtitle="", sections=(section,)))


@pytest.mark.parametrize("render", [console_text, markdown_text, page])
def test_every_format_shows_module_and_operator(render):
    allocation = LargeAllocation(
        size_bytes=4096,
        kind=ContentKind.ACTIVATIONS,
        module="layers.0",
        operator="tanh",
        shape=[32, 32],
        dtype="float32",
        phase="forward",
    )
    row = ModuleContents(
        module="layers.* (4)", bytes_by_kind={ContentKind.ACTIVATIONS: 4096}
    )
    contents = PeakContents(
        device="cuda",
        peak_bytes=4096,
        reserved_bytes=8192,
        phase="forward",
        module="layers.0",
        rows=[row],
        largest=[allocation],
        refused=RefusedAllocation(size_bytes=2**20, module="layers.0"),
    )
    text = render(peak_contents_section(contents, "micro_batch_size=512"))
    for word in ("layers.* (4)", "tanh", "32 x 32", "activations", "1 MiB"):
        assert word in text
