"""Stage ``saves``: what saving the state of training costs, by ``benchmarks.checkpoint``."""

from benchmarks.checkpoint import extra_s
from benchmarks.gpu.check.results import Sheet
from benchmarks.gpu.check.rig import Rig, TimeBox, check_end


def measure(rig: Rig, sheet: Sheet, box: TimeBox) -> None:
    """Run the benchmark's part that needs a device.

    Raises:
        NoTimeLeft: If it was cut off.
        TrialFailed: If it failed.
    """
    arguments = ["--only-stall", "--device", rig.site.device, "--dir", str(rig.scratch)]
    arguments += ["--model", rig.sizes.saved_model, "--repeats", str(rig.sizes.save_repeats)]
    found, ended = rig.program("benchmarks.checkpoint", arguments, box)
    if found:
        stall = found["stall"]
        sheet.details |= stall
        extra = {name: extra_s(stall, name) for name in ("synchronous", "asynchronous")}
        sheet.measured("state_bytes", stall["state_bytes"])
        sheet.measured("synchronous_save_s", extra["synchronous"])
        sheet.measured("asynchronous_save_s", extra["asynchronous"])
        sheet.measured("asynchronous_of_synchronous_share", extra["asynchronous"] / extra["synchronous"])
    check_end(ended, accepted=(0, 1, 2))  # it holds its own bars, of which some need a host alone
