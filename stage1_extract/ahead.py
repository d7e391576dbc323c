"""Ahead: the next item is made ready in a thread while the present one is worked on."""

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")
Made = TypeVar("Made")


def one_ahead(make: Callable[[Item], Made], items: Iterable[Item]) -> Iterator[tuple[Item, Made]]:
    """Each item with what `make` gives for it, the next one being made meanwhile.

    Items are taken one by one, each when the one before it is about to be worked on. An error of
    `make` is raised at its item's place.
    """
    with ThreadPoolExecutor(1, thread_name_prefix="ahead") as thread:
        present: tuple[Item, Future[Made]] | None = None
        for item in items:
            following = item, thread.submit(make, item)
            if present is not None:
                yield present[0], present[1].result()
            present = following
        if present is not None:
            yield present[0], present[1].result()
