"""Threads that end on the first error and on Ctrl-C."""

import contextlib
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")

_POLL_S = 0.005
"""Interval at which the main thread looks for results and receives signals, in
seconds."""


def run_in_threads(
    work: Callable[[Item], Result],
    items: Sequence[Item],
    threads: int,
    *,
    stop: Callable[[], None] = lambda: None,
) -> list[Result]:
    """Run ``work`` on each item in threads.

    After the first error, no further item is begun. The error is raised when all
    threads have ended.

    Args:
        work: Function to call with each item.
        items: Arguments.
        threads: Number of threads.
        stop: Callback on the first error and on Ctrl-C, to end running work early.

    Returns:
        The results, in the order of the items.
    """
    errors: list[BaseException] = []
    results: dict[int, Result] = {}

    def run(number: int, item: Item) -> None:
        try:
            if not errors:
                results[number] = work(item)
        except BaseException as error:  # noqa: BLE001 - raised again by the main thread
            errors.append(error)

    # Signals are blocked while the main thread uses the executor, as Ctrl-C could leave
    # its locks taken. Between polls they are delivered.
    executor = ThreadPoolExecutor(threads)
    try:
        with _blocked_signals():
            for number, item in enumerate(items):
                executor.submit(run, number, item)
        while len(results) < len(items) and not errors:
            time.sleep(_POLL_S)
    finally:
        if len(results) < len(items):
            stop()
        with _blocked_signals():
            executor.shutdown(cancel_futures=True)
    if errors:
        raise errors[0]
    return [results[number] for number in range(len(items))]


@contextlib.contextmanager
def _blocked_signals() -> Iterator[None]:
    """Hold back SIGINT and SIGTERM until the end of the block.

    Threads started in it never receive them.
    """
    previous_mask = signal.pthread_sigmask(
        signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM}
    )
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous_mask)
