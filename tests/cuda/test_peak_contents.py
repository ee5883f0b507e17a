"""Contents of memory at the peak of a step, from the real caching allocator."""

import json
from pathlib import Path

import pytest

from autotune.evidence.peak_contents import ContentKind, PeakContents
from tests.cuda.peak_contents_job import BATCH_SIZE, BIG_BYTES, LAYERS, WIDTH

pytestmark = pytest.mark.cuda
ROOT = Path(__file__).parents[2]
CASES = (
    "eager",
    "accumulate",
    "checkpoint",
    "oom",
    "ddp",
    "fsdp2",
    "compile",
    "compile_layers",
)
PARAMETERS_BYTES = 4 * LAYERS * (2 * 4 * WIDTH * WIDTH + 5 * WIDTH)
RESULT_BYTES = 4 * BATCH_SIZE * WIDTH


@pytest.fixture(scope="module")
def figures_by_case(null_gpus):
    machine = null_gpus(variables={"PYTHONPATH": str(ROOT)})
    ended = machine.run("-m", "tests.cuda.peak_contents_job", *CASES, timeout_s=600)
    assert ended.code == 0, ended
    lines = [line for line in ended.out.splitlines() if line.startswith("{")]
    return dict(zip(CASES, map(json.loads, lines), strict=True))


@pytest.fixture
def contents_of(figures_by_case):
    def contents_of(case):
        return PeakContents.model_validate(figures_by_case[case]["contents"])

    return contents_of


@pytest.mark.parametrize("case", [case for case in CASES if case != "oom"])
def test_contents_sum_to_the_allocators_peak(figures_by_case, contents_of, case):
    figures = figures_by_case[case]
    contents = contents_of(case)
    assert contents.peak_bytes == figures["recorded_bytes"]
    assert contents.not_attributed_bytes == contents.missed_releases_bytes == 0
    assert contents.reserved_bytes >= contents.peak_bytes
    # Peaks of DDP depend on when its own thread releases a work.
    if case != "ddp":
        assert contents.peak_bytes == figures["alone_bytes"]
    assert figures["history_entries"] == 0


@pytest.mark.parametrize("case", CASES)
def test_adam_has_two_states_per_parameter(contents_of, case):
    by_kind = contents_of(case).bytes_by_kind
    # The allocator rounds each tensor up to 512 bytes.
    rounding_bytes = 512 * LAYERS * 4
    assert by_kind[ContentKind.PARAMETERS] >= PARAMETERS_BYTES
    state_bytes = by_kind[ContentKind.OPTIMIZER_STATE]
    assert 0 <= state_bytes - 2 * PARAMETERS_BYTES <= 3 * rounding_bytes


def test_activations_belong_to_layers(contents_of):
    rows = {row.module: row for row in contents_of("eager").rows}
    # The result of a layer's first linear layer, which the activation function needs.
    # The last one has been released at the peak.
    up = rows[f"layers.*.up ({LAYERS})"]
    assert up.bytes_of(ContentKind.ACTIVATIONS) == (LAYERS - 1) * 4 * RESULT_BYTES


def test_accumulation_adds_gradients(contents_of):
    gradients = contents_of("accumulate").bytes_by_kind[ContentKind.GRADIENTS]
    assert gradients >= PARAMETERS_BYTES
    assert gradients > contents_of("eager").bytes_by_kind[ContentKind.GRADIENTS]


def test_checkpointing_keeps_fewer_activations(contents_of):
    kind = ContentKind.ACTIVATIONS
    kept_bytes = contents_of("checkpoint").bytes_by_kind[kind]
    assert kept_bytes < contents_of("eager").bytes_by_kind[kind]


def test_fsdp_gathers_parameters(contents_of):
    parameters_bytes = contents_of("fsdp2").bytes_by_kind[ContentKind.PARAMETERS]
    assert parameters_bytes > contents_of("eager").bytes_by_kind[ContentKind.PARAMETERS]


@pytest.mark.parametrize(
    ("case", "module"),
    [("compile", "Model"), ("compile_layers", f"layers.* ({LAYERS})")],
)
def test_compiled_code_is_attributed_as_a_whole(contents_of, case, module):
    contents = contents_of(case)
    assert contents.is_compiled
    [row] = [row for row in contents.rows if row.module == module]
    activation_bytes = contents.bytes_by_kind[ContentKind.ACTIVATIONS]
    assert row.bytes_of(ContentKind.ACTIVATIONS) > 0.99 * activation_bytes


def test_out_of_memory_names_the_refused_allocation(contents_of):
    contents = contents_of("oom")
    assert contents.refused.size_bytes == BIG_BYTES
    assert contents.refused.module == "Model"
    assert contents.refused.operator == "empty"
    assert contents.phase == "forward"
    activation_bytes = contents.bytes_by_kind[ContentKind.ACTIVATIONS]
    # Each layer keeps two wide results, four times as large, and its own.
    assert activation_bytes == LAYERS * 9 * RESULT_BYTES
