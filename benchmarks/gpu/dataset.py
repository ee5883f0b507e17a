"""The dataset that all stages read."""

import shutil
from pathlib import Path

from autotune.errors import AutotuneError
from benchmarks.gpu.stages import Sizes
from testbed.corpora import real_lengths, write_learnable_corpus

DATA = "data"


def make_data(out: Path, given: Path | None, sizes: Sizes) -> None:
    """Put the dataset at ``data``.

    It is the given one, or one of real lengths whose ids mean nothing.
    """
    data = out / DATA
    if given is not None and not data.exists():
        data.symlink_to(given.absolute())
    elif given is None and not data.exists():
        partial = out / f"{DATA}.partial"
        shutil.rmtree(partial, ignore_errors=True)
        lengths = (
            real_lengths(sizes.samples, seed=0),
            real_lengths(sizes.samples // 50, seed=1),
        )
        write_learnable_corpus(partial, *lengths, vocab_size=sizes.vocab_size).rename(
            data
        )
    elif given is not None and data.resolve() != given.resolve():
        raise AutotuneError(
            f"{data} is another dataset than {given}", next_step="Choose another --out."
        )


def link_data(out: Path, folder: Path) -> None:
    """Let the commands of a check find the dataset in its folder."""
    link = folder / DATA
    if not link.exists():
        link.unlink(missing_ok=True)  # to a dataset that is gone
        link.symlink_to(Path("..") / DATA if folder.parent == out else out / DATA)
