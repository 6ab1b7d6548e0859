"""The start of a script, and the process that started this one.

The scripts import this first: a launcher may be killed during other imports.
"""

import atexit
import gc
import multiprocessing
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

_PARENT = os.getppid()
_exit_codes: list[int] = []  # the exit code of this process, once `run_main` has ended


def start_script() -> None:
    """Prepare this process for the imports of a script and for a quick exit.

    `run_main` restores Ctrl-C and the garbage collector after the imports.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C in these imports prints no traceback
    gc.disable()  # these imports make 400,000 objects, hardly any garbage
    atexit.register(_leave)  # registered first, so called last


def collect_garbage() -> None:
    """Turn the garbage collector on after the imports of a script; it ignores the objects that they have made."""
    if not gc.isenabled():
        gc.freeze()
        gc.enable()


@contextmanager
def record_exit_code() -> Iterator[None]:
    """Record the exit code of a script, with which `_leave` ends the process without Python's clean-up of 1 s."""
    code = 1
    try:
        yield
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 0 if error.code is None else 1
        raise
    finally:
        _exit_codes.append(code)


def _leave() -> None:
    """Exit at once if `run_main` has run. Threads have ended, and all other `atexit` functions have been called."""
    if _exit_codes:
        for stream in (sys.stdout, sys.stderr):
            with suppress(AttributeError, OSError, ValueError):  # closed, or absent
                stream.flush()
        os._exit(_exit_codes[-1])


def parent_number() -> int:
    """Return the number of the process that started this one, even if it has ended.

    multiprocessing passes the number to the processes that it starts; such a process may have imported everything, for
    seconds, before this module.
    """
    parent = multiprocessing.parent_process()
    return (parent and parent.pid) or _PARENT
