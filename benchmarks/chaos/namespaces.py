"""Run a server, or another context, in the network namespace of a simulated machine."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")


@contextmanager
def inside(host: str, context: AbstractContextManager[T]) -> Iterator[T]:
    """Enter and leave a context in a thread inside the namespace `host`: the sockets that it opens belong there."""
    with ThreadPoolExecutor(1, initializer=_enter, initargs=(host,)) as thread:
        value = thread.submit(context.__enter__).result()
        try:
            yield value
        finally:
            thread.submit(context.__exit__, None, None, None).result()


def _enter(host: str) -> None:
    with Path("/run/netns", host).open("rb") as namespace:
        if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), 0):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
