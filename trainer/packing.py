"""Which samples share a row: best-fit packing. Pure."""

import numpy as np
import numpy.typing as npt

Int64 = npt.NDArray[np.int64]


def pack_rows(lengths: Int64, row_tokens: int) -> Int64:
    """Put samples into as few rows as best fit finds: longest first, each into the fullest row that has room.

    Open rows are kept by their free places, and one bit per number of free places says which numbers occur, so that the
    best row is found by the lowest set bit, without a search (Johnson 1973 bounds the result by 11/9 of the optimum).

    Args:
        lengths: Shape (N,), tokens of each sample, special tokens included, each from 1 to ``row_tokens``.
        row_tokens: Places in a row.

    Returns:
        Shape (N,): the number of each sample's row; rows are numbered from 0 without gaps.

    Raises:
        ValueError: If a sample is longer than a row, or empty.
    """
    if len(lengths) and not 1 <= int(lengths.min()) <= int(lengths.max()) <= row_tokens:
        raise ValueError(f"lengths from {lengths.min()} to {lengths.max()} do not all lie in 1 to {row_tokens}")
    sizes = lengths.tolist()
    rows = [0] * len(sizes)
    opened = 0
    with_free: list[list[int]] = [[] for _ in range(row_tokens)]
    occurring = 0
    for sample in np.argsort(-lengths, kind="stable").tolist():
        size = sizes[sample]
        roomy = occurring >> size
        if roomy:
            free = size + (roomy & -roomy).bit_length() - 1
            candidates = with_free[free]
            row = candidates.pop()
            if not candidates:
                occurring ^= 1 << free
        else:
            row, free = opened, row_tokens
            opened += 1
        rows[sample] = row
        free -= size
        if free:
            if not with_free[free]:
                occurring |= 1 << free
            with_free[free].append(row)
    return np.array(rows, dtype=np.int64)
