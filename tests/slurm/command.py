"""The commands sbatch, srun and scontrol of the stand-in for SLURM: sends the command line to cluster.py."""

from __future__ import annotations

import json
import os
import socket
import sys
from typing import NoReturn


def main() -> NoReturn:
    """Send this command with its environment and folder, print the answer, and exit with its code."""
    command, *arguments = sys.argv[1:]
    request = {"command": command, "arguments": arguments, "environment": dict(os.environ), "folder": os.getcwd()}
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(os.environ["SLURM_STAND_IN"])
        connection.sendall(json.dumps(request).encode() + b"\n")
        answer = json.loads(connection.makefile().readline() or '{"code": 1, "text": "", "error": "no answer"}')
    print(answer["text"], end="", flush=True)
    print(answer["error"], end="", file=sys.stderr, flush=True)
    sys.exit(answer["code"])


if __name__ == "__main__":
    main()
