"""Choice between the kernels of varlen attention."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.model.varlen_kernels import MEASURED, fastest_kernels

LENGTHS = st.floats(0.0, 1e6)


@pytest.mark.parametrize("row", MEASURED, ids=lambda row: str(row.document_tokens))
def test_measured_length_gets_its_fastest_kernels(row):
    kernels = fastest_kernels(row.document_tokens)
    is_fa4_forward = row.fa4.forward_ms < row.fa2.forward_ms
    is_fa4_backward = row.fa4.backward_ms < row.fa2.backward_ms
    assert (kernels.forward == "fa4") == is_fa4_forward
    assert (kernels.backward == "fa4") == is_fa4_backward


def test_documents_of_real_lengths_get_both_kernels():
    # 179 documents in 32,768 tokens were faster so, see MEASURED.
    kernels = fastest_kernels(32_768 / 179)
    assert (kernels.forward, kernels.backward) == ("fa2", "fa4")


@given(LENGTHS, LENGTHS)
def test_longer_documents_keep_flash_attention_4(first, second):
    shorter, longer = (fastest_kernels(length) for length in sorted((first, second)))
    for direction in ("forward", "backward"):
        if getattr(shorter, direction) == "fa4":
            assert getattr(longer, direction) == "fa4"
