"""Imports without garbage collections."""

import gc
import weakref

import pytest

from trainer.runtime.garbage_collection import collection_paused


class Node:
    """An object that refers to itself, so that only the collector can free it."""

    def __init__(self) -> None:
        self.itself = self


def test_no_collection_runs_within():
    collections = gc.get_stats()
    with collection_paused():
        for _ in range(10 * gc.get_threshold()[0]):
            Node()
        assert gc.get_stats() == collections
    assert gc.isenabled()


def test_later_collections_skip_what_was_imported():
    with collection_paused():
        imported = weakref.ref(Node())
    made_later = weakref.ref(Node())
    gc.collect()
    assert imported() is not None
    assert made_later() is None


def test_disabled_collector_stays_disabled():
    gc.disable()
    try:
        with collection_paused():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_failed_import_enables_the_collector_again():
    with pytest.raises(ImportError), collection_paused():
        raise ImportError
    assert gc.isenabled()
