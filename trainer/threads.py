"""Work done by a few threads that Ctrl-C ends at any moment. No torch here."""

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")

_LOOK_EVERY_S = 0.005


def in_threads(
    work: Callable[[Item], Result], items: Sequence[Item], threads: int, *, stop: Callable[[], None] = lambda: None
) -> list[Result]:
    """Do a piece of work for each item, several at once.

    An executor of the standard library can hang here: a KeyboardInterrupt that comes while the main thread has just
    taken one of its locks, and before it has entered the block that gives it back, leaves all workers waiting for it.
    So the main thread shares no lock with these workers.

    Args:
        work: What to do; it may run in any thread.
        items: What to do it for.
        threads: How many at once, at most.
        stop: Called on the first error and on Ctrl-C, to ask work that is under way to end early; no more is begun.

    Returns:
        The results, in the order of the items.

    Raises:
        BaseException: The first that a piece of work raised, when all have ended.
    """
    waiting = list(enumerate(items))[::-1]
    results: dict[int, Result] = {}
    errors: list[BaseException] = []
    ended: list[None] = []

    def take() -> None:
        while not errors:
            try:
                number, item = waiting.pop()
            except IndexError:
                break
            try:
                results[number] = work(item)
            except BaseException as error:  # noqa: BLE001 - raised again by the main thread
                errors.append(error)
        ended.append(None)

    workers = [threading.Thread(target=take) for _ in range(min(threads, len(items)))]
    started: list[threading.Thread] = []
    try:
        # Starting a thread takes such locks, too. Workers inherit the mask: signals are the main thread's.
        with _signals_later():
            for worker in workers:
                worker.start()
                started.append(worker)
        while len(ended) < len(workers) and not errors:
            time.sleep(_LOOK_EVERY_S)
    finally:
        if len(results) < len(items):
            waiting.clear()
            stop()
        for worker in started:
            worker.join()
    if errors:
        raise errors[0]
    return [results[number] for number in range(len(items))]


@contextlib.contextmanager
def _signals_later() -> Iterator[None]:
    """Leave signals for after the block."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
