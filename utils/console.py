"""Console output of a run: lines, colours, progress bars and remaining time. Called by utils/run.py and the scripts."""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TextIO, TypeVar

from tqdm import tqdm

from utils.errors import printable

T = TypeVar("T")
REFRESH_SECONDS = 1.0  # between two updates of the values beside a bar; each synchronises the device
BAR_FORMAT = "{desc} {percentage:3.0f}%|{bar:5}| "
BAR_COLUMNS = len(" 100%|12345| ")  # width of the bar without its title
LEAST_COLUMNS = 80  # minimum width of tables and of the line of an epoch, and the width if the output is not a terminal
MAX_NAMES = 10  # names in a line of names
SHORTEST_NAME = 8  # characters that a name in a table keeps, however narrow the table
YELLOW, PLAIN = "\x1b[33m", "\x1b[0m"  # ANSI codes
_silent: list[bool] = []  # not empty after a call of `silence`


def silence() -> None:
    """Stop this process from printing help and errors of the command line; another process prints them."""
    _silent.append(True)


def is_silent() -> bool:
    """Return whether `silence` was called."""
    return bool(_silent)


def columns() -> int:
    """Return the width of tables and lines: $COLUMNS, else the terminal's width; at least `LEAST_COLUMNS`."""
    return max(shutil.get_terminal_size((LEAST_COLUMNS, 24)).columns, LEAST_COLUMNS)


def show(*lines: str) -> None:
    """Print lines above the progress bar; warnings are yellow on a terminal, unless the user has set NO_COLOR.

    On a terminal long lines are wrapped between words; in a file or pipe a message is one line. Characters that stdout
    cannot encode, such as undecodable bytes of a file name, are escaped.
    """
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    terminal = sys.stdout.isatty()
    coloured = terminal and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    for line in lines:
        text = printable(line).encode(encoding, "backslashreplace").decode(encoding)
        text = wrapped(text) if terminal else text
        tqdm.write(f"{YELLOW}{text}{PLAIN}" if coloured and line.startswith("warning: ") else text, file=sys.stdout)
    sys.stdout.flush()


def duration(seconds: float) -> str:
    """Format a duration in hours, minutes and seconds, such as 1:02:03 or 2:03."""
    return tqdm.format_interval(round(seconds)).removeprefix("0")


def wrapped(line: str) -> str:
    """Return a line wrapped between words to fit the terminal; continuations are indented. Paths stay whole."""
    if len(line) <= columns() or "  " in line.strip():  # the row of a table, such as the profiler's
        return line
    indent = f"{line[: len(line) - len(line.lstrip())]}  "
    return textwrap.fill(line, columns(), subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def joined(parts: Sequence[str]) -> list[str]:
    """Return parts separated by commas on as few lines as fit; lines after the first are indented."""
    return wrapped(", ".join(part.replace(" ", "\xa0") for part in parts)).replace("\xa0", " ").splitlines()


def listed(names: Sequence[str], width: int) -> str:
    """Return the first of some names, separated by commas, and how many more there are.

    As many names as fit into `width` characters are listed, at most `MAX_NAMES`; a first name that is too long loses
    its middle.
    """
    more = ""
    for count in range(min(len(names), MAX_NAMES), 0, -1):
        more = f" and {len(names) - count} more" if count < len(names) else ""
        if len(text := ", ".join(names[:count]) + more) <= width:
            return text
    return short_name(names[0], max(width - len(more), SHORTEST_NAME)) + more if names else ""


def short_name(name: str, width: int) -> str:
    """Return `name`, without its middle if it has more than `width` characters; `width` is at least 5."""
    half = width // 2 - 1
    return name if len(name) <= width else f"{name[: width - half - 2]}..{name[-half:]}"


def table(rows: Sequence[Sequence[str | float]], width: int | None = None) -> list[str]:
    """Return the lines of a table with right-aligned columns, at most `width` wide, by default `columns()`.

    The first column has the rows' names. Floats have four decimals, or three in a table that would be too wide; if that
    is not enough, names are shortened in the middle.
    """
    for digits in (4, 3):
        cells = [[f"{cell:.{digits}f}" if isinstance(cell, float) else str(cell) for cell in row] for row in rows]
        longest, *widths = [max(map(len, column)) for column in zip(*cells, strict=True)] or [0]
        room = (width or columns()) - sum(widths) - len(widths)
        if longest <= room:
            break
    room = min(longest, max(room, SHORTEST_NAME))
    return [" ".join([short_name(name, room).rjust(room), *map(str.rjust, row, widths)]) for name, *row in cells]


class RemainingTime:
    """Estimates the remaining time of a run from the mean time per batch, validations included.

    The caller increments `done`.

    Args:
        batches: remaining batches of the run at the start
    """

    def __init__(self, batches: int) -> None:
        self.batches, self.done, self._started = batches, 0, time.monotonic()

    def seconds(self) -> float:
        """Return the remaining seconds; 0 before the first batch is done."""
        return (time.monotonic() - self._started) / self.done * (self.batches - self.done) if self.done else 0.0


class Bar:
    """A progress bar over batches, with images per second and other values.

    Args:
        images: number of images in the whole pass
        shown: whether to draw the bar, which is drawn on terminals only; times are measured in any case
        done: number of images that were done before the start
    """

    def __init__(self, title: str, images: int, shown: bool, done: int = 0) -> None:
        self.title, self.images, self.shown, self.done = title, images, shown, done
        self.waited = 0.0  # seconds that this process waited for batches
        self.seconds = 0.0  # duration of the whole pass, set at its end

    @property
    def rate(self) -> float:
        """Images per second of the whole pass; 0 before its end."""
        return (self.images - self.done) / max(self.seconds, 1e-9) if self.seconds else 0.0

    def over(self, batches: Iterable[T], size: Callable[[T], int]) -> Iterator[T]:
        """Iterate over `batches`; `size` maps a batch to its number of images."""
        self.started = self._last = asked = time.monotonic()
        with tqdm(
            total=self.images,
            initial=self.done,
            desc=self.title,
            unit=" img",
            disable=None if self.shown else True,  # None: on terminals only
            leave=False,
            dynamic_ncols=True,
            bar_format=f"{BAR_FORMAT}{{rate_fmt}}",
        ) as self._bar:
            for batch in batches:
                self.waited += time.monotonic() - asked
                yield batch
                self._bar.update(size(batch))
                asked = time.monotonic()
        self.seconds = time.monotonic() - self.started

    @property
    def waiting(self) -> float:
        """The fraction of the time so far in which this process waited for batches."""
        return self.waited / max(time.monotonic() - self.started, 1e-9)

    def due(self) -> bool:
        """Return whether it is time to show new values."""
        return not self._bar.disable and time.monotonic() - self._last > REFRESH_SECONDS

    @property
    def rate_so_far(self) -> float:
        """Images per second since the start of the pass."""
        return (self._bar.n - self.done) / max(time.monotonic() - self.started, 1e-9)

    def show(self, values: Sequence[str]) -> None:
        """Show values beside the bar, in order; the last ones are left out if they do not fit the terminal."""
        self._last, text = time.monotonic(), ""
        width = (self._bar.format_dict["ncols"] or LEAST_COLUMNS) - len(self.title) - BAR_COLUMNS
        for value in values:
            longer = f"{text}, {value}" if text else value
            text = longer if len(longer) <= width else text
        self._bar.bar_format = BAR_FORMAT + text


class _Survivor:
    """A text stream that drops what cannot be written, because its reader has ended or the disk is full."""

    def __init__(self, stream: TextIO | None) -> None:
        self.stream = stream or open(os.devnull, "w")  # noqa: SIM115  # None: closed before Python started

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    def write(self, text: str) -> int:
        with suppress(OSError, ValueError):
            self.stream.write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError, ValueError):
            self.stream.flush()


@contextmanager
def surviving_output() -> Iterator[None]:
    """Return a context in which a closed or unwritable stdout or stderr does not end the process."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = map(_Survivor, before)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before
        for stream in filter(None, before):
            try:
                stream.flush()
            except (OSError, ValueError):  # Python would end with exit code 120
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
