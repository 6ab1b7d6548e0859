"""Whether the server of a tracker accepts connections."""

from __future__ import annotations

import socket

import pytest

from utils.tracking.reachable import unreachable


def test_a_server_without_a_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is given up long before the packages' own time limits; behind a proxy they try by themselves."""
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "all_proxy", "ALL_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        assert unreachable(url, 0.6) == f"{url} cannot be reached (Connection refused)"
        monkeypatch.setenv("http_proxy", url)
        assert unreachable(url, 0.6) == ""
        monkeypatch.delenv("http_proxy")
        taken.listen()
        assert unreachable(url, 0.6) == ""
