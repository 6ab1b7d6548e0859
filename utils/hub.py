"""Weight files of the Hugging Face Hub, --weights hf:owner/name. Called by models/weights/releases.py."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from utils.console import listed
from utils.errors import UserError, first_line
from utils.files import cache_folder, one_at_a_time

HUB_PREFIX = "hf:"  # prefix of --weights
NAME = re.compile(r"(?://)?([\w.-]+/[\w.-]+)(?:@([^/]+))?(?:/(.+))?")  # owner/name, revision, file
TOKEN = re.compile(r"Bearer [^'\"]*|hf_\w+")  # in errors of a library
WEIGHT_SUFFIXES = (".pt", ".pth", ".safetensors")
BEST = "best.pt"
LISTED_COLUMNS = 200  # width of the list of files in a message
SERVER_TIMEOUT_SECONDS = 20.0


def fetch(name: str) -> Path:
    """Return a weight file of the Hub, in the cache of huggingface_hub, downloaded if necessary.

    One process of a machine downloads, the others wait. If the Hub does not give the file, the cached one is returned,
    if there is one. Raises `UserError`.

    Args:
        name: owner/name, owner/name/file, or with a revision owner/name@revision; without a file it means best.pt, else
            the repository's only weight file
    """
    import huggingface_hub as hub
    import huggingface_hub.constants

    flag = f"--weights {HUB_PREFIX}{name}"
    parts = NAME.fullmatch(name)
    if not parts:
        raise UserError(f"{flag} is not of the form {HUB_PREFIX}owner/name or {HUB_PREFIX}owner/name/file.pt")
    repository, revision, file = parts.groups()
    hub.utils.logging.set_verbosity_error()
    with one_at_a_time(cache_folder() / "hub" / f"{repository.replace('/', '--')}.lock"):
        try:
            info = hub.HfApi().model_info(repository, revision=revision, timeout=SERVER_TIMEOUT_SECONDS)
            file = _choose(flag, file, [sibling.rfilename for sibling in info.siblings or []])
            if not isinstance(hub.try_to_load_from_cache(repository, file, revision=info.sha), str):
                licence = "".join(f" (licence: {tag[8:]})" for tag in info.tags or [] if tag.startswith("license:"))
                print(f"downloading {HUB_PREFIX}{repository}/{file}{licence}", file=sys.stderr, flush=True)
            return Path(hub.hf_hub_download(repository, file, revision=revision))
        except UserError:
            raise
        except Exception as error:  # of any class, depending on the version
            with suppress(Exception):
                return Path(hub.hf_hub_download(repository, file or BEST, revision=revision, local_files_only=True))
            page = f"{hub.constants.ENDPOINT}/{repository}"
            raise UserError(
                f"{flag} cannot be downloaded ({first_line(Exception(TOKEN.sub('...', str(error))))}); check the name "
                f"and the network, and if {page} is private or gated, log in with `hf auth login`, or set HF_TOKEN"
            ) from None


def _choose(flag: str, file: str | None, files: Sequence[str]) -> str:
    """Return the file of a repository to load. Raises `UserError`, which begins with the flag and its value."""
    weights = sorted(name for name in files if name.endswith(WEIGHT_SUFFIXES))
    wanted = file or (weights[0] if len(weights) == 1 else BEST)
    if wanted not in files:
        holds = listed(weights or sorted(files), LISTED_COLUMNS) or "no files"
        raise UserError(f"{flag} has no {wanted}; it holds {holds}: name one, as in {HUB_PREFIX}owner/name/file.pt")
    return wanted
