"""The command line: flags become the options of a script, over defaults of a job, a task or a data set YAML."""

from __future__ import annotations

import argparse
import dataclasses
import re
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from utils.config.hyperparameters import OVERRIDE
from utils.config.options import TrainOptions, flags_of
from utils.config.ranges import Range, is_number
from utils.config.yolov5_flags import REFUSED
from utils.distributed.ranks import speaks
from utils.errors import UserError, nearest

T = TypeVar("T")


def given_flags(kind: type, argv: Sequence[str]) -> dict[str, Any]:
    """The flags in `argv` and their values, and no others."""
    parser, words = _parser(kind), _joined(argv)
    if _has_overrides(kind):
        for name in dict.fromkeys(word.split("=")[0] for word in words if word.startswith(OVERRIDE)):
            parser.add_argument(name, dest="overrides", action=_Override)
    return vars(parser.parse_args(words))


def _has_overrides(kind: type) -> bool:
    return any(field.name == "overrides" for field in dataclasses.fields(kind))


def _joined(argv: Sequence[str]) -> list[str]:
    """`--hyp.shear -1e-1` as one word: argparse would take -1e-1 for a flag."""
    words: list[str] = []
    for word in argv:
        if words and words[-1].startswith(OVERRIDE) and "=" not in words[-1] and re.match(r"-[\d.in]", word):
            words[-1] += f"={word}"
        else:
            words.append(word)
    return words


def parse_options(kind: type[T], argv: Sequence[str], job: Mapping[str, Any] | None = None) -> T:
    """The flags in `argv` as a `kind`. `job` gives other defaults, where no flag names data, model, weights or hyp."""
    given = given_flags(kind, argv)
    chooses_files = any(name in given for name in ("data", "cfg", "weights", "hyp"))
    return kind(**{**({} if chooses_files or job is None else job), **given})


# Flags whose defaults a data YAML may bring, under `defaults:`.
SUGGESTED = ("hyp", "epochs", "batch_size", "imgsz", "optimizer", "cos_lr", "label_smoothing")


def suggestions(values: Any, source: Path) -> dict[str, Any]:
    """What a data YAML suggests for flags of train.py. Raises `UserError` that names the key which is none or wrong."""
    if not isinstance(values, dict):
        raise UserError(f"{source}: `defaults` must be lines such as `imgsz: 64`, not {values!r}")
    hints = typing.get_type_hints(TrainOptions)
    fields = {field.name: field.metadata for field in dataclasses.fields(TrainOptions) if field.name in SUGGESTED}
    found = {}
    for key, value in values.items():
        if key not in fields:
            raise UserError(
                f"{source}: unknown key '{key}' under `defaults`{nearest(str(key), fields)}; known are "
                f"{', '.join(SUGGESTED)}"
            )
        metadata, kind = fields[key], hints[key]
        fits = isinstance(value, kind) if kind in (bool, str) else is_number(value) and kind(value) == value
        if fits and kind in (int, float):
            fits = value in metadata["within"]
        if not fits or (metadata["choices"] and value not in metadata["choices"]):
            raise UserError(f"{source}: `{key}` under `defaults` is {value!r}, which --{key.replace('_', '-')} refuses")
        found[key] = kind(value)
    return found


def with_defaults(options: T, argv: Sequence[str], *better: Mapping[str, Any]) -> T:
    """`options` with other defaults for what `argv` does not say; later ones in `better` are stronger."""
    given = given_flags(type(options), argv)
    found = {key: value for values in better for key, value in values.items() if key not in given}
    return dataclasses.replace(options, **found)  # type: ignore[type-var]


def _parser(kind: type) -> argparse.ArgumentParser:
    text = f"{OVERRIDE}KEY VALUE gives one hyperparameter another value than --hyp does, such as {OVERRIDE}lr0 0.005"
    more = text if _has_overrides(kind) else None
    parser = _Parser(description=kind.__doc__, epilog=more, argument_default=argparse.SUPPRESS, allow_abbrev=False)
    hints = typing.get_type_hints(kind)
    for option in flags_of(kind):
        names = [option.name, *option.metadata["aliases"]]
        flags = list(
            dict.fromkeys(f"--{word}" for name in names for word in (name.replace("_", "-"), name.replace("-", "_")))
        )
        default = " ".join(map(str, option.default)) if isinstance(option.default, tuple) else repr(option.default)
        text = f"{option.metadata['help']} (default {default or 'none'})"
        parser.add_argument(*flags, dest=option.name, help=text, **_action(hints[option.name], option.metadata))
    return parser


def _action(hint: Any, metadata: Mapping[str, Any]) -> dict[str, Any]:
    """What argparse needs to know of a field of this type."""
    if hint is bool:
        return {"action": "store_true"}
    if typing.get_origin(hint) is tuple:
        kind = typing.get_args(hint)[0]
        action: dict[str, Any] = {} if kind is str else {"type": _within(kind, metadata["within"])}
        if metadata["choices"]:
            action["choices"] = metadata["choices"]
        return {**action, "nargs": "+", "action": _Words if metadata["parted"] else _Tuple}
    action = {"type": hint if hint is str else _within(hint, metadata["within"])}
    if metadata["choices"]:
        action["choices"] = metadata["choices"]
    if metadata["const"] is not None:
        action |= {"nargs": "?", "const": metadata["const"]}
    return action


def _within(kind: Callable[[str], Any], allowed: Range) -> Callable[[str], Any]:
    def convert(text: str) -> Any:
        value = kind(text)
        if value not in allowed:
            raise argparse.ArgumentTypeError(f"{text} is out of range; give {allowed}")
        return value

    convert.__name__ = getattr(kind, "__name__", "value")  # argparse names it where the text is no number
    return convert


class _Tuple(argparse.Action):
    """Keeps several values as a tuple, so that the dataclass stays immutable."""

    def __call__(
        self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: str | None = None
    ) -> None:
        setattr(namespace, self.dest, tuple(values))


class _Words(argparse.Action):
    """Keeps several words as a tuple; commas part them too."""

    def __call__(
        self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: str | None = None
    ) -> None:
        words = (word.strip() for value in values for word in value.split(","))
        setattr(namespace, self.dest, tuple(filter(None, words)))


class _Override(argparse.Action):
    """Keeps the text of a single hyperparameter beside those of others."""

    def __call__(
        self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: str | None = None
    ) -> None:
        key = str(option_string).removeprefix(OVERRIDE).replace("-", "_")
        setattr(namespace, self.dest, {**getattr(namespace, self.dest, {}), key: values})


class _Parser(argparse.ArgumentParser):
    """One sentence and exit code 2 for a wrong flag, naming the nearest known one, instead of the whole usage."""

    def _print_message(self, message: str, file: Any = None) -> None:
        if speaks():
            super()._print_message(message, file)

    def error(self, message: str) -> typing.NoReturn:
        known = [name for name in self._option_string_actions if name.startswith("--")]
        if message.startswith("unrecognized arguments: "):
            wrong = message.split(": ", 1)[1].split()[0]
            name = wrong.split("=")[0]
            if instead := REFUSED.get(name.removeprefix("--").replace("-", "_")):
                self.exit(2, f"error: {name} {instead}\n")
            message = f"unknown flag {wrong}{nearest(name, known)}"
        choice = re.match(r"argument (?:--\S+/)*--(\S+): invalid choice: '(\w+)'", message)
        if choice and (instead := REFUSED.get(f"{choice[1].replace('-', '_')} {choice[2]}")):
            self.exit(2, f"error: --{choice[1]} {choice[2]} {instead}\n")
        self.exit(2, f"error: {message}; see {self.prog} --help\n")
