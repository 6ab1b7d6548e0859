"""The Hugging Face Hub: weights from it, and the results of a run to it.

    python -m utils.tracking.hub runs/train/exp owner/name     upload the results of a run, also again

models/weights/releases.py calls `fetch`, `RunLog` calls `push_run`. Both import huggingface_hub when they are called.
"""

from __future__ import annotations

import argparse
import math
import re
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from utils.background import Background
from utils.errors import UserError, first_line, plural, shortened
from utils.files import cache_folder, one_at_a_time

HUB_PREFIX = "hf:"  # prefix of --weights
NAME = re.compile(r"(?://)?([\w.-]+/[\w.-]+)(?:@([^/]+))?(?:/(.+))?")  # owner/name, revision, file
WEIGHT_SUFFIXES = (".pt", ".pth", ".safetensors")
BEST = "best.pt"
CARD, PUBLISHED_CARD = "model_card.md", "README.md"  # names of the model card in the run folder and on the Hub
UNKNOWN_LICENCE = "unknown"
RESULTS = ("results.csv", "*.png", "*.jpg")  # files of a run folder to upload
EXPORTS = ("best.*", "best_*_model/*")  # files in weights/ of a run folder to upload
MAX_LISTED_FILES = 10  # files that a message lists
SERVER_TIMEOUT_SECONDS = 20.0
PUSH_SECONDS = 900.0  # time limit of an upload
LOGIN = "log in with `hf auth login`, or set HF_TOKEN"


# From the Hub


def fetch(name: str) -> Path:
    """Return a weight file of the Hub, in the cache of huggingface_hub, downloaded if necessary.

    One process of a machine downloads, the others wait. If the Hub cannot be reached, the file must be in the cache.
    Raises `UserError`.

    Args:
        name: owner/name, owner/name/file, or with a revision owner/name@revision; without a file it means best.pt, else
            the repository's only weight file
    """
    flag = f"--weights {HUB_PREFIX}{name}"
    parts = NAME.fullmatch(name)
    if not parts:
        raise UserError(f"{flag} is not of the form {HUB_PREFIX}owner/name or {HUB_PREFIX}owner/name/file.pt")
    repository, revision, file = parts.groups()
    hub = _hub()
    with one_at_a_time(cache_folder() / "hub" / f"{repository.replace('/', '--')}.lock"):
        try:
            info = hub.HfApi().model_info(repository, revision=revision, timeout=SERVER_TIMEOUT_SECONDS)
            chosen = _choose(flag, file, [sibling.rfilename for sibling in info.siblings or []])
            if not isinstance(hub.try_to_load_from_cache(repository, chosen, revision=info.sha), str):
                licence = "".join(f" (licence: {tag[8:]})" for tag in info.tags or [] if tag.startswith("license:"))
                print(f"downloading {HUB_PREFIX}{repository}/{chosen}{licence}", file=sys.stderr, flush=True)
            return Path(hub.hf_hub_download(repository, chosen, revision=revision))
        except UserError:
            raise
        except Exception as error:  # of any class, depending on the version
            unreachable = _status(error) in (None, 429, *range(500, 600))
            if unreachable and (cached := _cached(repository, revision, file)):
                return cached
            raise UserError(f"{flag} cannot be downloaded: {_reason(error, repository)}") from None


def _choose(flag: str, file: str | None, files: Sequence[str]) -> str:
    """Return the file of a repository to load. Raises `UserError`.

    Args:
        flag: the flag with its value, which begins the error
    """
    weights = sorted(name for name in files if name.endswith(WEIGHT_SUFFIXES))
    if file in files or (file is None and BEST in files):
        return file or BEST
    if file is None and len(weights) == 1:
        return weights[0]
    problem = f"has no file {file}" if file else f"has no {BEST} and {plural(len(weights), 'weight file')}"
    listed = weights or sorted(files)
    more = f" and {len(listed) - MAX_LISTED_FILES} more" if len(listed) > MAX_LISTED_FILES else ""
    holds = f"it holds {', '.join(listed[:MAX_LISTED_FILES])}{more}" if listed else "it is empty"
    raise UserError(f"{flag} {problem}; {holds}: name a file, as in {HUB_PREFIX}owner/name/file.pt")


def _cached(repository: str, revision: str | None, file: str | None) -> Path | None:
    """Return the file to load from the cache of huggingface_hub, None if it is not there."""
    folder = Path(_hub().constants.HF_HUB_CACHE) / f"models--{repository.replace('/', '--')}"
    reference = folder / "refs" / (revision or "main")
    commit = reference.read_text().strip() if reference.is_file() else revision
    snapshot = folder / "snapshots" / (commit or "")
    files = [path.relative_to(snapshot).as_posix() for path in snapshot.rglob("*") if path.is_file()] if commit else []
    with suppress(UserError):
        return snapshot / _choose("", file, files)
    return None


# To the Hub


def push_run(folder: Path, repository: str, card: str) -> str:
    """Write the model card of a run and upload its results, within `PUSH_SECONDS`.

    Returns a line for the console, a warning if the upload failed.
    """
    later = f"to push them later: python -m utils.tracking.hub {folder} {repository}"
    lines: list[str] = []

    def upload() -> None:
        try:
            (folder / CARD).write_text(card, encoding="utf-8", errors="replace")  # file names may be any bytes
            _hub().utils.disable_progress_bars()
            lines.append(f"pushed to {push(folder, repository)}")
        except Exception as error:
            problem = error.strerror if isinstance(error, OSError) else first_line(error, 1000)
            lines.append(f"warning: the results are not on the Hub: {problem}; {later}")

    thread = Background("the upload to the Hub has failed", lines.append)  # huggingface_hub sets no time limit
    thread.do(upload)
    if thread.finish(PUSH_SECONDS):
        return lines[0]
    return f"warning: the results are not on the Hub: the upload has not ended after {PUSH_SECONDS:.0f} s; {later}"


def push(folder: Path, repository: str) -> str:
    """Upload the results of a run in one commit and return the address of the repository.

    A repository that does not exist is made, as a private one. Raises `UserError`.
    """
    files = results(folder)
    if problem := login_problem():
        raise UserError(problem)
    hub = _hub()
    try:
        api = hub.HfApi()
        address = api.create_repo(repository, private=True, exist_ok=True)
        additions = [hub.CommitOperationAdd(name, _card(file, repository)) for name, file in files.items()]
        api.create_commit(repository, additions, commit_message=f"Results of {folder.absolute().name}")
    except Exception as error:
        raise UserError(f"{repository} cannot be written to: {_reason(error, repository)}") from None
    return str(address)


def results(folder: Path) -> dict[str, Path]:
    """Return the files of a run folder to upload, by their names on the Hub. Raises `UserError` without weights."""
    best = folder / "weights" / BEST
    if not best.is_file():
        raise UserError(f"{folder} has no weights/{BEST}; name the folder of a run of train.py")
    files = {file.name: file for pattern in RESULTS for file in sorted(folder.glob(pattern))}
    card = {PUBLISHED_CARD: folder / CARD} if (folder / CARD).is_file() else {}
    exports = [file for pattern in EXPORTS for file in sorted(best.parent.glob(pattern))]
    made = best.stat().st_mtime  # older exports are made from other weights
    exports = [file for file in exports if file.is_file() and file.stat().st_mtime >= made]
    return {**{file.relative_to(best.parent).as_posix(): file for file in exports}, **files, **card}


def login_problem() -> str:
    """Return why this machine cannot upload anything; '' if there is a token and HF_HUB_OFFLINE is not set."""
    hub = _hub()
    if hub.constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set; unset it"
    return "" if _token() else f"there is no token for the Hub: {LOGIN}"


def _card(file: Path, repository: str) -> Path | bytes:
    """Return the file to upload; a model card of unknown licence takes the licence of the card on the Hub."""
    unknown = f"\nlicense: {UNKNOWN_LICENCE}\n"
    if file.name != CARD or unknown not in (text := file.read_text(encoding="utf-8")):
        return file
    published: dict[str, Any] = {}
    with suppress(Exception):  # the Hub may have no card yet
        hub = _hub()
        published = hub.metadata_load(hub.hf_hub_download(repository, PUBLISHED_CARD)) or {}
    licence = {key: value for key, value in published.items() if key.startswith("license")}
    return text.replace(unknown, f"\n{yaml.safe_dump(licence)}" if licence else unknown, 1).encode()


def model_card(
    repository: str,
    *,
    data: str,
    tag: str,
    licence: str,
    values: Mapping[str, float],
    names: Sequence[str],
    command: str,
) -> str:
    """Return a model card.

    Args:
        data: name of the data set
        tag: the Hub's tag for the task
        values: metrics by name
        names: class names
        command: command that trained the model
    """
    from huggingface_hub import EvalResult, ModelCardData

    name = repository.partition("/")[2]
    metrics = {metric: round(float(value), 5) for metric, value in values.items() if math.isfinite(value)}
    results = [EvalResult(tag, data, data, metric, value, metric_name=metric) for metric, value in metrics.items()]
    head = ModelCardData(
        library_name="lockstep",
        license=licence,
        pipeline_tag=tag,
        tags=[tag, "lockstep"],
        model_name=name,
        eval_results=results,
    )
    classes = shortened(", ".join(names), 1000)
    rows = "".join(f"| {metric} | {value} |\n" for metric, value in metrics.items())
    return (
        f"---\n{head.to_yaml()}\n---\n\n"
        f"# {name}\n\n"
        f"Trained with Lockstep on the data set `{data}`, {plural(len(names), 'class')}: {classes}.\n\n"
        f"| metric | value |\n|---|---|\n{rows}\n"
        f"```bash\n{command}\n```\n\n"
        f"To use it:\n\n```bash\npython detect.py --weights {HUB_PREFIX}{repository} --source photos\n```\n"
    )


# Both ways


def _hub() -> Any:
    """Return the package huggingface_hub, set to print no warnings."""
    import huggingface_hub.constants
    import huggingface_hub.utils

    huggingface_hub.utils.logging.set_verbosity_error()
    return huggingface_hub


def _token() -> str | None:
    """Return the token that huggingface_hub finds, None if there is none."""
    with suppress(Exception):  # the file of the token cannot be read
        return str(_hub().get_token() or "") or None
    return None


def _status(error: BaseException | None) -> int | None:
    """Return the status code of the answer that caused an error, None if there was no answer."""
    while error is not None:
        if (response := getattr(error, "response", None)) is not None:
            return int(response.status_code)
        error = error.__cause__
    return None


def _reason(error: BaseException, repository: str) -> str:
    """Return why a request to the Hub failed, and what to do; the token is not shown."""
    hub, code = _hub(), _status(error)
    page, token = f"{hub.constants.ENDPOINT}/{repository}", _token()
    if hub.constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set, and the cache does not hold it; unset it once, or give the path of a file"
    if type(error).__name__ == "GatedRepoError":
        return f"its owner must grant you access: request it at {page}, and {LOGIN}"
    if code == 401 and not token:
        return f"it does not exist, or needs a token: check the name, or {LOGIN}"
    if code in (401, 403):
        return (
            f"the Hub refuses the token ({code}), which is invalid or lacks a permission: {LOGIN}, with another token"
        )
    if code == 404:
        return "there is no such repository, revision or file, or your token may not see it: check the name"
    text = re.sub(r"Bearer [^'\"]*", "Bearer ...", str(error).replace(token or "\0", "..."))
    what = shortened(text.strip().partition("\n")[0] or type(error).__name__)
    return f"the transfer failed ({what}); check the network, {hub.constants.ENDPOINT} and the disk, and try again"


def main() -> None:
    """Run the command: print the address of the repository, or an error with exit code 1."""
    parser = argparse.ArgumentParser("python -m utils.tracking.hub", description="Upload the results of a run.")
    parser.add_argument("folder", type=Path, help="run folder")
    parser.add_argument("repository", help="owner/name; a private repository is made if it does not exist")
    options = parser.parse_args()
    try:
        print(push(options.folder, options.repository))
    except UserError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
