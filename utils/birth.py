"""The process that started this one. The scripts import this first: a launcher may be killed during other imports."""

import multiprocessing
import os

_PARENT = os.getppid()


def parent_number() -> int:
    """Return the number of the process that started this one, even if it has ended.

    Processes of multiprocessing are told the number; a spawned one has imported everything before it gets here.
    """
    parent = multiprocessing.parent_process()
    return (parent and parent.pid) or _PARENT
