"""``autotune data verify``: whether a dataset is what its manifest says."""

from pathlib import Path
from typing import Annotated

import typer

from autotune.commands.options import AsJson
from autotune.core.units import format_bytes, format_count
from autotune.errors import BadInput
from trainer.progress import progress

_SHOWN_FAULTS = 20


def verify(
    *,
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="The dataset.")],
    as_json: AsJson = False,
) -> None:
    """Read a whole dataset and check every hash, offset and id. Ends with 3 when anything is wrong."""
    from autotune.corpus.verify import verify as verify_dataset
    from autotune.show.answers import answer_json

    found = verify_dataset(directory, progress)
    if as_json:
        said = {"path": directory, "dataset_hash": found.manifest.dataset_hash, "files": found.files}
        print(answer_json({**said, "bytes_read": found.bytes_read, "faults": found.faults}))
    else:
        for fault in found.faults[:_SHOWN_FAULTS]:
            print(f"{fault.file!r}: {fault.what}")
    if found.faults:
        files = sorted({fault.file for fault in found.faults})
        more = f" and {len(files) - 3} more" if len(files) > 3 else ""
        raise BadInput(
            f"{directory} is damaged: {len(found.faults)} faults in {', '.join(map(repr, files[:3]))}{more}",
            next_step="Copy these files again from where they came from, or prepare the dataset again.",
        )
    if not as_json:
        samples = found.manifest.train.samples + found.manifest.validation.samples
        size = format_bytes(found.bytes_read)
        print(f"{directory} is whole: {format_count(samples)} samples, {found.files} files, {size} read")
