"""torchrun as a child of this process: signals are passed on, and nothing of it outlives this process."""

import contextlib
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence

from autotune.process import start

_PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_FOR_TORCHRUN = {signal.SIGUSR1: signal.SIGTERM, signal.SIGUSR2: signal.SIGTERM}
"""torchrun passes on fewer signals than the trainer hears; the others would end it at once."""


def run_child(command: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run a command to its end; gives its exit code.

    Args:
        command: The program with its arguments.
        environment: Its environment variables.
    """
    # It ends with this process; the ranks' own watch sees that, and they save and leave.
    child = start(
        command,
        env=dict(environment),
        # A terminal sends Ctrl-C to all of a session's foreground: passed on, it comes once.
        start_new_session=True,
    )
    with _passing_on_to(child):
        return child.wait()


@contextlib.contextmanager
def _passing_on_to(child: "subprocess.Popen[bytes]") -> Iterator[None]:
    def pass_on(number: int, frame: object) -> None:
        del frame
        child.send_signal(_FOR_TORCHRUN.get(signal.Signals(number), number))

    before = {number: signal.signal(number, pass_on) for number in _PASSED_ON}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
