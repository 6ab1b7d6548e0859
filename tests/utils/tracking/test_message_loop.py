"""The process of a tracker: it ends after the training process, whatever the tracker does."""

from __future__ import annotations

import subprocess
import sys

import psutil

from utils.files import ROOT

HANGING = """
import time
from utils.tracking import message_loop
message_loop.ORPHAN_SECONDS = 0.5
class Hanging(message_loop.Session):
    def start(self): pass
    def log(self): time.sleep(600)
    def finish(self, code=0): pass
message_loop.serve(Hanging)
"""
TRAINING = """
import subprocess, sys, time
command = [sys.executable, "-c", sys.argv[1]]
tracker = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
tracker.stdin.write('{"method": "start"}\\n{"method": "log"}\\n')
tracker.stdin.flush()
tracker.stdout.readline()  # it has started
print(tracker.pid, flush=True)
time.sleep(600)
"""


def test_a_call_that_never_returns() -> None:
    command = [sys.executable, "-c", TRAINING, HANGING]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as training:
        assert training.stdout
        tracker = psutil.Process(int(training.stdout.readline()))
        training.kill()
        try:
            tracker.wait(30)
        finally:
            if tracker.is_running():
                tracker.kill()
