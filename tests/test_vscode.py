"""The editor's launch.json: its files exist, and a breakpoint stops training on one process and on two."""

from __future__ import annotations

import ast
import functools
import importlib.util
import itertools
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from queue import Empty, Queue
from typing import Any

import psutil
import pytest

from tests.conftest import ROOT, free_port, left_behind

Entry = dict[str, Any]  # of launch.json, and arguments of a debugger session
LIMIT = 120.0  # seconds, of each wait
REACH_SECONDS = 60.0  # to the breakpoint
ATTEMPTS = 3  # now and then the debugger loses a process that attaches, which then waits for ever
PROCESSES = {"train: one process": 1, "train: two CPU processes under accelerate launch": 2}


def entries() -> dict[str, Entry]:
    """Return the entries of launch.json by name, with the folder inserted as the editor does."""
    content = json.loads((ROOT / ".vscode" / "launch.json").read_text(encoding="utf-8"))
    filled = json.dumps(content["configurations"]).replace("${workspaceFolder}", ROOT.as_posix())
    return {entry["name"]: entry for entry in json.loads(filled)}


def test_files_of_the_entries_exist() -> None:
    assert set(entries()) == {*PROCESSES, "attach"}
    for entry in entries().values():
        assert (entry["type"], entry["justMyCode"], entry.get("subProcess", True)) == ("debugpy", False, True)
        assert "${" not in json.dumps(entry)  # no variable is left
        texts = [entry.get("program", ""), *entry.get("args", ())]
        assert all((Path(entry["cwd"]) / text).is_file() for text in texts if text.endswith((".py", ".yaml")))
        assert "module" not in entry or importlib.util.find_spec(entry["module"])


class Debugger:
    """The editor's part in the Debug Adapter Protocol: a session per process, each on its own connection."""

    def __init__(self, line: int) -> None:
        self.line = line  # breakpoint in train.py
        self.answers: list[str] = []  # of the stopped processes
        self.sessions: dict[socket.socket, Entry] = {}
        self.received: Queue[tuple[socket.socket, dict[str, Any]]] = Queue()
        self.numbers = itertools.count(1)

    def open(self, entry: Entry) -> bool:
        """Start a session; return False if the port is not open yet."""
        try:
            connection = socket.create_connection((entry["connect"]["host"], entry["connect"]["port"]))
        except ConnectionRefusedError:
            return False
        self.sessions[connection] = entry
        threading.Thread(target=self.receive, args=(connection,), daemon=True).start()
        self.send(connection, "initialize", adapterID="debugpy", pathFormat="path")
        return True

    def send(self, connection: socket.socket, command: str, **arguments: Any) -> None:
        request = {"seq": next(self.numbers), "type": "request", "command": command, "arguments": arguments}
        body = json.dumps(request).encode()
        connection.sendall(b"Content-Length: %d\r\n\r\n%s" % (len(body), body))

    def receive(self, connection: socket.socket) -> None:
        with suppress(OSError), connection, connection.makefile("rb") as stream:
            while header := stream.readline():
                stream.readline()
                self.received.put((connection, json.loads(stream.read(int(header.split()[1])))))

    def stopped(self, count: int) -> bool:
        """Answer a message if one arrives in 0.1 s; return whether `count` processes have stopped."""
        with suppress(Empty):
            self.answer(*self.received.get(timeout=0.1))
        return len(self.answers) == count

    def answer(self, connection: socket.socket, message: dict[str, Any]) -> None:
        match message:
            case {"type": "response", "success": False}:
                raise AssertionError(message)
            case {"command": "initialize"}:
                self.send(connection, "attach", **self.sessions[connection])
            case {"event": "initialized"}:
                where = {"source": {"path": str(ROOT / "train.py")}, "breakpoints": [{"line": self.line}]}
                self.send(connection, "setBreakpoints", **where)
                self.send(connection, "configurationDone")
            case {"event": "debugpyAttach", "body": entry}:
                assert self.open(entry)
            case {"event": "stopped", "body": {"reason": "breakpoint", "threadId": thread}}:
                self.send(connection, "stackTrace", threadId=thread)
            case {"command": "stackTrace", "body": {"stackFrames": [{"id": frame, "line": line}, *_]}}:
                assert line == self.line
                question = "(run.accelerator.process_index, run.accelerator.num_processes, number)"
                self.send(connection, "evaluate", expression=question, frameId=frame)
            case {"command": "evaluate", "body": {"result": answer}}:
                self.answers.append(answer)

    def end(self) -> None:
        """End the sessions and their processes."""
        for connection in self.sessions:
            with suppress(OSError):  # it has ended with another one
                self.send(connection, "disconnect", terminateDebuggee=True)


def first_line_of_the_loop() -> int:
    """Return the number of the first line in train_one_epoch's loop over batches."""
    tree = ast.parse((ROOT / "train.py").read_text(encoding="utf-8"))
    function = next(node for node in ast.walk(tree) if getattr(node, "name", "") == "train_one_epoch")
    return next(node for node in ast.walk(function) if isinstance(node, ast.For)).body[0].lineno


def until(condition: Callable[[], object], seconds: float = LIMIT) -> bool:
    end = time.monotonic() + seconds
    while not (done := condition()) and time.monotonic() < end:
        time.sleep(0.01)
    return bool(done)


@pytest.mark.parametrize("name", PROCESSES)
def test_a_breakpoint_stops_every_process(name: str, small_data: Path, tmp_path: Path) -> None:
    answers: list[str] = []
    for attempt in range(ATTEMPTS):
        if not answers:
            answers = answers_at_the_breakpoint(name, small_data, tmp_path / str(attempt))
    assert sorted(answers) == [f"({rank}, {PROCESSES[name]}, 0)" for rank in range(PROCESSES[name])]


def answers_at_the_breakpoint(name: str, data: Path, folder: Path) -> list[str]:
    """Start an entry's command under a debugger that listens, and use the entry `attach`; return an answer of each
    process, or [] if not all processes reach the breakpoint in time.
    """
    folder.mkdir()
    entry, port, cache = entries()[name], int(free_port()), str(folder / "cache")
    # The debugger's adapter and the launcher's processes start sessions of their own
    left = functools.partial(left_behind, f"XDG_CACHE_HOME={cache}", patience=0)
    listening = [sys.executable, "-m", "debugpy", "--listen", f"127.0.0.1:{port}", "--wait-for-client"]
    target = [entry["program"]] if "program" in entry else ["-m", entry["module"]]
    what = ["--data", str(data), "--weights", "", "--cfg", "yolov5n.yaml", "--hyp", "data/hyps/shapes.yaml"]
    how = ["--imgsz", "64", "--epochs", "1", "--batch-size", "8", "--device", "cpu", "--noplots"]
    with (folder / "printed.txt").open("w") as printed:
        debuggee = subprocess.Popen(
            [*listening, *target, *entry["args"], *what, *how, "--project", str(folder)],
            env={**os.environ, "OMP_NUM_THREADS": "1", **entry.get("env", {}), "XDG_CACHE_HOME": cache},
            cwd=entry["cwd"],
            stdout=printed,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    debugger, count = Debugger(first_line_of_the_loop()), PROCESSES[name]
    session = {**entries()["attach"], "connect": {"host": "127.0.0.1", "port": port}}
    try:
        assert until(lambda: debugger.open(session) or debuggee.poll() is not None), "the debugger does not listen"
        if not until(lambda: debugger.stopped(count) or debuggee.poll() is not None, REACH_SECONDS):
            return []
        debugger.end()
        assert until(lambda: debuggee.poll() is not None and not left()), "processes are left"
        return debugger.answers
    finally:
        for process in left():
            with suppress(psutil.NoSuchProcess):
                process.kill()
        debuggee.wait(LIMIT)
        print((folder / "printed.txt").read_text())  # shown if the test fails
