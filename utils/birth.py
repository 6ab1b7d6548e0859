"""The start of a script, and the process that started this one.

The scripts import this first: a launcher may be killed during other imports.
"""

import gc
import multiprocessing
import os
import signal

_PARENT = os.getppid()


def start_script() -> None:
    """Prepare this process for the imports of a script; `run_main` resets both settings after them."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C in these imports prints no traceback
    gc.disable()  # these imports make 400,000 objects, hardly any garbage


def parent_number() -> int:
    """Return the number of the process that started this one, even if it has ended.

    Processes of multiprocessing are told the number; a spawned one has imported everything before it gets here.
    """
    parent = multiprocessing.parent_process()
    return (parent and parent.pid) or _PARENT
