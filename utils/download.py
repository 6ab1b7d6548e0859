"""Download files once per machine, checked and never partly written: from addresses, and weights of the Hub.

Called by data/download.py, data/media.py and models/weights.py.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

from tqdm import tqdm

from utils.errors import UserError, first_line, without_secrets
from utils.files import cache_folder, one_at_a_time, replacing

SCHEMES = ("http", "https", "file")
SERVER_TIMEOUT_SECONDS = 20.0  # longest wait for data from the server
ATTEMPTS = 3
RETRY_SECONDS = 1.0  # wait before the second attempt; doubled before the third
BLOCK_BYTES = 2**20  # bytes read at once
HUB_PREFIX = "hf:"  # prefix of --weights
HUB_NAME = re.compile(r"(?://)?([\w.-]+/[\w.-]+)(?:@([^/]+))?(?:/(.+))?")  # owner/name, revision, file
HUB_TOKEN = re.compile(r"Bearer [^'\"]*|hf_\w+")  # in errors of a library
WEIGHT_SUFFIXES = (".pt", ".pth", ".safetensors")
BEST = "best.pt"


def download(
    address: str,
    path: Path,
    sha256: str = "",
    usable: Callable[[Path], bool] = os.path.isfile,
    advice: str = "",
    licence: str = "",
) -> Path:
    """Download the file at `address` to `path` unless `path` exists, and return `path`; print its `licence`.

    One process of a machine downloads, the others wait. Server errors and broken connections are tried again. Raises
    `UserError` with the address, the reason and `advice`.

    Args:
        sha256: first hex digits of the file's SHA-256, if known
        usable: checks the downloaded file
    """
    with one_at_a_time(path.with_name(f"{path.name}.lock")):
        for attempt in range(ATTEMPTS):
            try:
                if not path.is_file():
                    _fetch(address, path, sha256, usable, licence)
                break
            except (OSError, ValueError, HTTPException) as error:  # URLError and socket errors are OSErrors
                # Without an answer it fails at once, as on a machine without a network.
                is_temporary = error.code >= 500 if isinstance(error, HTTPError) else not isinstance(error, URLError)
                if attempt == ATTEMPTS - 1 or isinstance(error, ValueError) or not is_temporary:
                    reason = str(getattr(error, "reason", error)) or type(error).__name__
                    advice = advice or f"download it in another way and save it as {path}"
                    raise UserError(f"{address} cannot be downloaded ({reason}); {advice}") from None
                time.sleep(RETRY_SECONDS * 2**attempt)
    return path


def is_address(text: Any) -> bool:
    """Return whether `text` is an address for `download`."""
    return isinstance(text, str) and re.fullmatch(rf"(?:{'|'.join(SCHEMES)})://\S+", text) is not None


def _fetch(address: str, path: Path, sha256: str, usable: Callable[[Path], bool], licence: str) -> None:
    """Download a file once. Raises OSError or HTTPException, or ValueError if it need not be tried again."""
    if not is_address(address):
        raise ValueError(f"it must begin with {', '.join(f'{scheme}://' for scheme in SCHEMES)} and have no spaces")
    if "@" in urlsplit(address).netloc:
        raise ValueError("it must have no user name and password")
    request = Request(address, headers={"User-Agent": "lockstep"})
    with urlopen(request, timeout=SERVER_TIMEOUT_SECONDS) as answer, replacing(path) as file:
        licence = f" (licence: {licence})" if licence else ""
        print(f"downloading {without_secrets(address)}{licence}", file=sys.stderr, flush=True)
        length = int(answer.headers.get("Content-Length") or 0)
        if length > (free := shutil.disk_usage(path.parent).free):
            raise ValueError(f"it needs {gigabytes(length)}, and {gigabytes(free)} are free")
        # disable=None: a progress bar on terminals only
        with tqdm.wrapattr(answer, "read", length or None, desc=path.name, disable=None, leave=False) as source:
            shutil.copyfileobj(source, file, BLOCK_BYTES)
        if length and file.tell() != length:
            raise OSError(f"the connection ended after {file.tell()} of {length} bytes")
        file.flush()
        part = Path(file.name)
        is_expected = not sha256 or hashlib.sha256(part.read_bytes()).hexdigest().startswith(sha256)
        if not is_expected or not usable(part):
            raise ValueError("the content is not the expected one, or damaged")


def gigabytes(size: float) -> str:
    """Format a number of bytes in MB or GB."""
    return f"{size / 1e9:.1f} GB" if size >= 1e8 else f"{size / 1e6:.1f} MB"


def fetch_from_hub(name: str) -> Path:
    """Return a weight file of the Hugging Face Hub in the cache of huggingface_hub, downloaded if necessary.

    One process of a machine downloads, the others wait. If the Hub does not give the file, a cached one is returned.
    Raises `UserError`. The name is owner/name, owner/name/file, or with a revision owner/name@revision; without a file
    it means best.pt, else the repository's only weight file.
    """
    import huggingface_hub as hub

    flag, parts = f"--weights {HUB_PREFIX}{name}", HUB_NAME.fullmatch(name)
    if not parts:
        raise UserError(f"{flag} is not of the form {HUB_PREFIX}owner/name or {HUB_PREFIX}owner/name/file.pt")
    repository, revision, file = parts.groups()
    hub.utils.logging.set_verbosity_error()
    with one_at_a_time(cache_folder() / "hub" / f"{repository.replace('/', '--')}.lock"):
        try:
            info = hub.HfApi().model_info(repository, revision=revision, timeout=SERVER_TIMEOUT_SECONDS)
            weights = [each.rfilename for each in info.siblings or [] if each.rfilename.endswith(WEIGHT_SUFFIXES)]
            file = file or (weights[0] if len(weights) == 1 else BEST)
            licence = "".join(f" (licence: {tag[8:]})" for tag in info.tags or [] if tag.startswith("license:"))
            print(f"{HUB_PREFIX}{repository}/{file}{licence}", file=sys.stderr, flush=True)
            return Path(hub.hf_hub_download(repository, file, revision=revision))
        except Exception as error:  # of any class, depending on the version
            with suppress(Exception):
                return Path(hub.hf_hub_download(repository, file or BEST, revision=revision, local_files_only=True))
            raise UserError(
                f"{flag} cannot be downloaded ({first_line(Exception(HUB_TOKEN.sub('...', str(error))))}); check the "
                f"name, as in {HUB_PREFIX}owner/name/file.pt, and the network, and log in with `hf auth login` or set "
                "HF_TOKEN if it is private or gated"
            ) from None
