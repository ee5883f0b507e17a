"""Where the figures of a GPU come from, in words, or why there are none."""

from collections.abc import Sequence

from autotune.core.trial import FeedFigures
from autotune.search.site import Site

NVML_SOURCE = (
    "NVML utilisation, the share of time in which at least one kernel ran; it is not MFU: a kernel may use a small "
    "part of the GPU, or wait for other ranks"
)
GPM_SOURCE = "GPM counters over windows within the measured one"


def gpu_source(site: Site, windows: Sequence[FeedFigures], *, replayed: bool) -> str:
    """The source of each kind of figure.

    Args:
        site: Where it was measured.
        windows: What was measured.
        replayed: Whether a GPU's step was only replayed.
    """
    if replayed:
        return "n/a (its step was replayed on this CPU)"
    if site.gpu is None:
        return f"n/a (CPU run{'' if site.gpu_absent is None else f': {site.gpu_absent}'})"
    gpus = [gpu for one in windows for gpu in one.gpus]
    lacking = next((gpu.lacking for gpu in gpus if gpu.lacking), "nothing was sampled")
    no_counters = next((gpu.gpm_lacking for gpu in gpus if gpu.gpm_lacking), "nothing was counted")
    read = any(gpu.utilisation_share is not None for gpu in gpus)
    nvml = NVML_SOURCE if read else f"NVML utilisation: n/a ({lacking})"
    gpm = GPM_SOURCE if any(gpu.gpm_windows for gpu in gpus) else f"GPM: n/a ({no_counters})"
    return f"{site.gpu.name}; {nvml}; {gpm}"
