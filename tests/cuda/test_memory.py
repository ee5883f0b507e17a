"""Memory that is predicted on the meta device, beside what torch's own CUDA allocator reserves."""

import pytest

from tests.nullgpu.memory import Case, on_pretended_gpus

pytestmark = pytest.mark.cuda
TINY = {"model": "bert-mini", "gpu": "rtx-4090-24gb"}
CASES = (
    Case(**TINY),
    Case(**TINY, attention="sdpa", dropout=0.1, checkpointing="full"),
    pytest.param(Case(**TINY, compiled=True, checkpointing="full"), marks=pytest.mark.soak),  # each trial compiles
    Case(**TINY, ranks=2),
    Case(**TINY, ranks=2, strategy="zero1", checkpointing="selective"),
    Case(**TINY, ranks=2, strategy="fsdp2"),
)
PEAK_ERROR = {False: 0.01, True: 0.03}
"""By whether layers are compiled."""


@pytest.mark.usefixtures("cuda_environment")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_largest_micro_batch_is_predicted(case):
    found = on_pretended_gpus(case)
    assert found["proven"], found
    assert found["predicted_peak_bytes"] == pytest.approx(found["allocator_peak_bytes"], rel=PEAK_ERROR[case.compiled])
    assert found["predicted_rows"] == pytest.approx(found["largest_rows"], rel=PEAK_ERROR[case.compiled])
    assert len(found["trials"]) <= 6
