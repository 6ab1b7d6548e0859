"""Whether a server accepts connections. Used by the processes of trackers, whose packages would wait for minutes."""

from __future__ import annotations

import socket
import time
import urllib.request
from urllib.parse import urlsplit

REACH_SECONDS = 5.0  # for a connection to a server to be accepted
REACH_RETRY_SECONDS = 0.5  # between two such connections


def unreachable(url: str, seconds: float = REACH_SECONDS) -> str:
    """Return why a server cannot be reached within `seconds`, '' if it can.

    '' too if a proxy is set, through which only the package itself connects.
    """
    if urllib.request.getproxies():
        return ""
    server, end = urlsplit(url), time.monotonic() + seconds
    while True:
        try:
            address = server.hostname or "", server.port or (80 if server.scheme == "http" else 443)
            socket.create_connection(address, max(end - time.monotonic(), 0.1)).close()
        except OSError as error:
            if time.monotonic() > end - REACH_RETRY_SECONDS:
                return f"{url} cannot be reached ({error.strerror or error})"
            time.sleep(REACH_RETRY_SECONDS)
        else:
            return ""
