"""What ``launch local`` and ``launch slurm`` share: their options, and the run that they describe."""

import importlib.metadata
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from autotune.commands.completion import profiles

if TYPE_CHECKING:
    from autotune.cluster.training import TrainRequest

ProfileOption = Annotated[Path, typer.Option("--profile", help="The profile to train from.", autocompletion=profiles)]
DataOption = Annotated[
    Path | None, typer.Option("--data", help="Dataset directory. Default: the profile's.", envvar="AUTOTUNE_DATA")
]
RunOption = Annotated[
    Path | None, typer.Option("--out", help="Run directory; one that is there goes on. Default: runs/<UTC>-<model>.")
]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="train.KEY=VALUE", help="Override a setting; repeatable."),
]
RequireApproved = Annotated[
    bool,
    typer.Option("--require-approved", help="Train only if the profile was approved as it is: autotune report review."),
]


def installed_torch() -> str | None:
    """Version of the torch that is installed here; None without one."""
    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return None


def train_request(
    profile: Path,
    data: Path | None,
    out: Path | None,
    assignments: Sequence[str] | None,
    *,
    python: str,
    nodes: int = 1,
    ranks: int | None = None,
    chain: int = 1,
    time: str | None = None,
    torch_of_profile: bool = False,
    reviews: Path | None = None,
) -> "TrainRequest":
    """Read the profile and look at the dataset before anything is started.

    ``torch_of_profile`` says that ranks run where torch is the profile's, whichever is installed here, if any.
    ``reviews`` is where an approval of just these settings has to lie; None where none is needed.

    Raises:
        TrainerError, AutotuneError: If a setting, the profile or the dataset cannot be used.
    """
    from autotune.cluster.training import TrainRequest, default_ranks
    from autotune.errors import MachineLacks, ProfileRefused
    from autotune.search.profiles import read_profile
    from autotune.search.reviews import refuse_other_settings, require_approved
    from trainer.dataset import read_manifest
    from trainer.record import code_sha256
    from trainer.resolve import resolve
    from trainer.writer import default_run_directory

    approved = None if reviews is None else require_approved(profile, reviews)
    approved_sha256 = None if approved is None else approved.file_sha256
    stored = (read_profile(profile) if approved is None else approved).profile
    resolved = resolve(profile, assignments=assignments or [], data=data, expect_sha256=approved_sha256)
    if approved is not None:
        refuse_other_settings(approved, resolved.config)
    there = read_manifest(resolved.data_dir).dataset_hash
    tuned_on = stored.fingerprint.dataset_hash
    if tuned_on != there:
        raise ProfileRefused(
            f"{resolved.data_dir} is not the dataset of the profile: its hash begins {there[:12]}, not {tuned_on[:12]}",
            next_step="Name the right one: --data DIR; or probe with this one: autotune probe",
        )
    torch_version = stored.fingerprint.torch if torch_of_profile else installed_torch()
    if torch_version is None:
        raise MachineLacks("torch is not installed", next_step="Install it: pip install torch")
    run = out or default_run_directory(resolved.config.model.name)
    return TrainRequest(
        profile_path=profile,
        profile=stored,
        config=resolved.config,
        data_dir=Path(os.path.normpath(resolved.data_dir)),
        assignments=list(assignments or []),
        run=run,
        nodes=nodes,
        ranks=ranks or default_ranks(stored),
        chain=chain,
        time=time,
        python=python,
        torch_version=torch_version,
        code_sha256=code_sha256(),
        directory=Path.cwd(),
        reviews=reviews,
        approved_sha256=approved_sha256,
    )
