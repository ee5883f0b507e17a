"""Schedule of learning rates, which all targets take from transformers. Pure."""

from dataclasses import dataclass

from autotune.subjects.mlm.export.table import RunToExport, Scalar


@dataclass(frozen=True, slots=True, kw_only=True)
class _Schedule:
    """Schedule of transformers, and its arguments besides the steps."""

    name: str
    arguments: dict[str, Scalar]


def schedule_name(run: RunToExport) -> str:
    """Return transformers' name of the schedule."""
    return _schedule(run).name


def schedule_arguments(run: RunToExport) -> dict[str, Scalar] | None:
    """Return the arguments of the schedule besides the steps; None without any."""
    return _schedule(run).arguments or None


def _schedule(run: RunToExport) -> _Schedule:
    """Return the schedule with the same learning rates after the warm-up."""
    train = run.train
    share = train.final_learning_rate_share
    arguments: dict[str, Scalar] = {}
    if train.schedule == "constant" or (train.schedule == "linear" and share == 1):
        name = "constant_with_warmup"
    elif train.schedule == "linear" and share == 0:
        name = "linear"
    elif train.schedule == "linear":
        name = "polynomial"
        arguments = {"lr_end": share * train.learning_rate, "power": 1.0}
    elif train.schedule == "cosine" and share == 0:
        name = "cosine"
    elif train.schedule == "cosine":
        name = "cosine_with_min_lr"
        arguments = {"min_lr_rate": share}
    else:
        name = "warmup_stable_decay"
        decay_steps = max(1, round(train.decay_share * train.max_steps))
        # The decay begins after the warm-up, even if it is then shorter than its share.
        first_decay_step = max(train.warmup_steps, train.max_steps - decay_steps)
        arguments = {
            "num_decay_steps": train.max_steps - first_decay_step,
            "decay_type": "1-sqrt",
            "min_lr_ratio": share,
        }
    return _Schedule(name=name, arguments=arguments)


def warm_up_remark(run: RunToExport) -> str | None:
    """Return the difference of the warm-up; None without one."""
    train = run.train
    if train.warmup_steps == 0:
        return None
    if train.schedule == "wsd" and train.final_learning_rate_share:
        return "its warm-up starts at the final learning rate instead of 0"
    # With n steps of warm-up it has the share 0/n, in this project's trainer 1/n.
    return "its first step has learning rate 0: the warm-up lags by one step"
