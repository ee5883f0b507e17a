from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from testbed.fakes import GPM_WINDOW, GPU_FACTS, SAMPLE
from trainer.formats import gpus


@given(st.integers(min_value=0, max_value=2**64 - 1))
def test_throttle_names_keep_every_bit(mask):
    bits = {name: bit for bit, name in gpus.THROTTLE_REASONS.items()}
    assert mask == sum(
        bits.get(name) or int(name.removeprefix("unknown_"), 16)
        for name in gpus.throttle_names(mask)
    )


ONE, TWO = (
    replace(GPU_FACTS, index=index, uuid=uuid)
    for index, uuid in enumerate(("GPU-aa11", "GPU-aa22"))
)
SLICED = replace(
    GPU_FACTS,
    index=2,
    uuid="GPU-bb33",
    mig_enabled=True,
    mig_uuids=("MIG-1x", "MIG-2y"),
)


@pytest.mark.parametrize(
    ("value", "seen"),
    [
        (None, (ONE, TWO, SLICED)),
        ("", ()),
        ("1,0", (TWO, ONE)),
        (" 1 , 2", (TWO, SLICED)),
        ("0,9,1", (ONE,)),
        ("-1", ()),
        ("0,-1,1", (ONE,)),
        ("0,0", ()),
        ("GPU-aa2,GPU-bb", (TWO, SLICED)),
        ("GPU-aa", ()),
        ("MIG-2y", (SLICED,)),
        ("MIG-1x,MIG-2y", (SLICED,)),
        ("MIG-GPU-bb33/1/0", (SLICED,)),
        ("NoDevFiles", ()),
    ],
)
def test_visible_devices_follow_cuda(value, seen):
    assert (
        gpus.visible_devices(
            [ONE, TWO, SLICED], {} if value is None else {"CUDA_VISIBLE_DEVICES": value}
        )
        == seen
    )


@given(st.text())
def test_visible_devices_are_a_subset(value):
    assert set(gpus.visible_devices([ONE, TWO], {"CUDA_VISIBLE_DEVICES": value})) <= {
        ONE,
        TWO,
    }


@given(
    st.lists(st.floats(0, 100), max_size=20).map(sorted),
    st.floats(0, 100),
    st.floats(0, 100),
)
def test_series_is_cut_between_two_moments(times_s, start_s, end_s):
    samples = tuple(replace(SAMPLE, time_s=time_s) for time_s in times_s)
    gpm = tuple(
        replace(GPM_WINDOW, start_s=time_s, end_s=time_s + 1) for time_s in times_s
    )
    cut = gpus.GpuSeries(
        samples=samples, gpm=gpm, lacking="a", gpm_lacking="b"
    ).between(start_s, end_s)
    assert [sample.time_s for sample in cut.samples] == [
        time_s for time_s in times_s if start_s <= time_s <= end_s
    ]
    inside = [time_s for time_s in times_s if start_s <= time_s and time_s + 1 <= end_s]
    assert [window.start_s for window in cut.gpm] == inside
    assert (cut.lacking, cut.gpm_lacking) == ("a", "b")
