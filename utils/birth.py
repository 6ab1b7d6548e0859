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
    """Prepare this process for the imports of a script, and for a quick end; `run_main` resets both settings."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C in these imports prints no traceback
    gc.disable()  # these imports make 400,000 objects, hardly any garbage
    atexit.register(_leave)  # registered first, so called last


def collect_garbage() -> None:
    """Collect garbage again after the imports of a script; what they have made stays, and is left out."""
    if not gc.isenabled():
        gc.freeze()
        gc.enable()


@contextmanager
def exit_code_noted() -> Iterator[None]:
    """Note the exit code of a script, so that its process can end without taking modules apart, which takes 1 s."""
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
    """End this process; all other functions of `atexit` have been called, and threads have ended."""
    if _exit_codes:
        for stream in (sys.stdout, sys.stderr):
            with suppress(AttributeError, OSError, ValueError):  # closed, or absent
                stream.flush()
        os._exit(_exit_codes[-1])


def parent_number() -> int:
    """Return the number of the process that started this one, even if it has ended.

    Processes of multiprocessing are told the number; a spawned one has imported everything before it gets here.
    """
    parent = multiprocessing.parent_process()
    return (parent and parent.pid) or _PARENT
