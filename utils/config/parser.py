"""The command line: flags become the options of a script, over the defaults of a job, a task and a data set YAML.

Called by the scripts and utils/config/; data/data_yaml.py calls `check_suggested_defaults`.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
import typing
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from utils.config.hyperparameters import DEFAULTS, OVERRIDE_PREFIX, find_hyperparameters
from utils.config.options import CONCERNS, GROUPS, TrainOptions, flags_of
from utils.config.values import NUMBER_OR_NAME, Range, accepts, chosen, has_form, is_choice, separated
from utils.config.yolov5_flags import REFUSED
from utils.console import is_silent
from utils.errors import UserError, nearest
from utils.files import read_yaml, version

if TYPE_CHECKING:
    from _typeshed import DataclassInstance, SupportsWrite

T = TypeVar("T", bound="DataclassInstance")

# Flags of train.py whose defaults a data set YAML may set under `defaults:`.
SUGGESTED = ("weights", "hyp", "epochs", "batch_size", "imgsz", "optimizer", "cos_lr", "label_smoothing")
# Flags of train.py whose defaults a hyperparameter YAML may set.
SUGGESTED_BY_HYP = ("epochs", "batch_size", "imgsz", "optimizer", "cos_lr", "label_smoothing", "close_mosaic")


def over_defaults(kind: type[T], given: Mapping[str, Any], job: Mapping[str, Any] | None = None) -> T:
    """Return given flags over their defaults as a `kind`.

    Args:
        job: defaults if no flag names data, model, weights or hyperparameters
    """
    names_files = any(name in given for name in ("data", "cfg", "weights", "hyp"))
    return kind(**{**({} if names_files or job is None else job), **given})


def given_flags(kind: type[DataclassInstance], argv: Sequence[str]) -> dict[str, Any]:
    """Return the values of the flags in `argv`, by field name. An invalid flag ends the process with exit code 2."""
    parser, words = _build_parser(kind), _join_negative_overrides(argv)
    if "overrides" in kind.__dataclass_fields__:
        parser.epilog = (
            f"{OVERRIDE_PREFIX}KEY VALUE sets a single hyperparameter, instead of the value in --hyp,\n"
            f"such as {OVERRIDE_PREFIX}lr0 0.005"
        )
        for name in dict.fromkeys(word.split("=")[0] for word in words if word.startswith(OVERRIDE_PREFIX)):
            parser.add_argument(name, dest="overrides", action=_Override)
    given = vars(parser.parse_args(words))
    return {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}


def words_of(given: Mapping[str, Any]) -> list[str]:
    """Return flags as the words of a command line, the inverse of `given_flags`."""
    words: list[str] = []
    for name, value in given.items():
        flag = f"--{name.replace('_', '-')}"
        if name == "overrides":
            words += [f"{OVERRIDE_PREFIX}{key}={text}" for key, text in value.items()]
        elif value is True:
            words.append(flag)
        else:
            texts = [str(item) for item in (value if isinstance(value, tuple) else [value])]
            words += [f"{flag}={texts[0]}"] if len(texts) == 1 and texts[0].startswith("-") else [flag, *texts]
    return words


def refuse_flags(
    kind: type[DataclassInstance], given: Mapping[str, Any], concerns: Collection[str], model: str
) -> None:
    """Raise `UserError` for a flag about something that a model does not have.

    Args:
        kind: options class that declares the flags
        given: values of the flags by name, see `given_flags`; a flag that is off or 0 asks for nothing
        concerns: keys of `CONCERNS` that apply to the model
        model: the model's task and head, in words
    """
    for option in flags_of(kind):
        subject = option.metadata["concerns"]
        if subject and subject not in concerns and given.get(option.name):
            flag = f"--{option.name.replace('_', '-')}"
            raise UserError(f"{flag} is for {CONCERNS[subject]}, not for {model}; leave it out")


def with_defaults(options: T, given: Mapping[str, Any], *defaults: Mapping[str, Any]) -> T:
    """Return `options` with other defaults for the flags that are not `given`; later mappings take precedence."""
    values = {key: value for mapping in defaults for key, value in mapping.items() if key not in given}
    return dataclasses.replace(options, **values)


def defaults_of_hyp(name: str) -> dict[str, Any]:
    """Return the `defaults:` of the hyperparameter file that --hyp names, {} if it has none. Raises `UserError`."""
    path = find_hyperparameters(name)
    return check_suggested_defaults(read_yaml(path).get(DEFAULTS, {}), path, SUGGESTED_BY_HYP)


def check_suggested_defaults(values: object, source: Path, known: Sequence[str] = SUGGESTED) -> dict[str, Any]:
    """Return the `defaults:` of a data set YAML or a hyperparameter YAML, by field name of `TrainOptions`.

    Raises `UserError` for an unknown key or a wrong value.

    Args:
        known: the flags that the file may set
    """
    if not isinstance(values, dict):
        raise UserError(f"{source}: `defaults` must be lines such as `imgsz: 64`, not {values!r}")
    hints = typing.get_type_hints(TrainOptions)
    fields = {field.name: field.metadata for field in flags_of(TrainOptions) if field.name in known}
    defaults = {}
    for key, value in values.items():
        if key not in fields:
            raise UserError(
                f"{source}: unknown key '{key}' under `defaults`{nearest(str(key), fields)}; known are "
                f"{', '.join(known)}"
            )
        if not accepts(hints[key], fields[key], value):
            raise UserError(f"{source}: `{key}` under `defaults` is {value!r}, which --{key.replace('_', '-')} refuses")
        defaults[key] = hints[key](value)
    return defaults


def _build_parser(kind: type[DataclassInstance]) -> argparse.ArgumentParser:
    examples = "".join(f"\n  {example}" for example in getattr(kind, "examples", ()))
    parser = _Parser(
        usage="%(prog)s [flags]",
        description=f"examples:{examples}" if examples else kind.__doc__,
        formatter_class=_Formatter,
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    version_line = f"lockstep {version()}"
    parser.add_argument("--version", action="version", version=version_line, help="print the version and exit")
    hints = typing.get_type_hints(kind)
    groups = {title: parser.add_argument_group(title) for title in GROUPS}  # empty ones are not shown
    for option in flags_of(kind):
        names = [option.name, *option.metadata["aliases"]]
        flags = dict.fromkeys(
            f"--{word}" for name in names for word in (name.replace("_", "-"), name.replace("-", "_"))
        )
        default = " ".join(map(str, option.default)) if isinstance(option.default, tuple) else repr(option.default)
        text = f"{option.metadata['help']} (default {default or 'none'})"
        groups[option.metadata["group"]].add_argument(
            *flags, dest=option.name, help=text, **_argument(hints[option.name], option.metadata)
        )
    return parser


def _join_negative_overrides(argv: Sequence[str]) -> list[str]:
    """Join `--hyp.shear -1e-1` into one word, because argparse would take -1e-1 for a flag."""
    words: list[str] = []
    for word in argv:
        if words and words[-1].startswith(OVERRIDE_PREFIX) and "=" not in words[-1] and re.match(r"-[\d.in]", word):
            words[-1] += f"={word}"
        else:
            words.append(word)
    return words


def _argument(hint: Any, metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of `add_argument` for a field of this type."""
    if hint is bool:
        return {"action": "store_true"}
    is_tuple = typing.get_origin(hint) is tuple
    kind = typing.get_args(hint)[0] if is_tuple else hint
    convert: Callable[[str], Any]
    if kind == NUMBER_OR_NAME:
        convert = _number_or_name
    else:
        convert = _of_form(metadata["form"]) if kind is str else _within(kind, metadata["within"])
    argument: dict[str, Any] = {"type": convert}
    if metadata["choices"] and metadata["comma_separated"]:
        argument["type"] = _list_of(metadata["choices"])
    elif metadata["choices"]:
        argument |= {"choices": metadata["choices"], "type": lambda word: chosen(word, metadata)}
    if is_tuple:
        return {**argument, "nargs": "+", "action": _Words if metadata["comma_separated"] else "store"}
    if metadata["const"] is not None:
        argument |= {"nargs": "?", "const": metadata["const"]}
    return argument


def _within(kind: type[float], allowed: Range) -> Callable[[str], float]:
    def convert(text: str) -> float:
        value = kind(text)
        if value not in allowed:
            raise argparse.ArgumentTypeError(f"{text} is out of range; give {allowed}")
        return value

    convert.__name__ = kind.__name__  # argparse names it if the text is not a number
    return convert


def _list_of(choices: Sequence[str]) -> Callable[[str], str]:
    """Return a function that checks a comma-separated list; `none` and `all` must stand alone."""

    def convert(text: str) -> str:
        words = separated(text)
        for word in words:
            if not is_choice(word, choices):
                known = ", ".join(choices)
                raise argparse.ArgumentTypeError(f"'{word}' is not one of {known}{nearest(word, choices)}")
            if word in ("none", "all") and len(words) > 1:
                raise argparse.ArgumentTypeError(f"'{word}' must stand alone in {text}")
        return ",".join(words)

    return convert


def _number_or_name(text: str) -> int | str:
    return int(text) if re.fullmatch(r"-?\d+", text) else text


def _of_form(form: str) -> Callable[[str], str]:
    def convert(text: str) -> str:
        if not has_form(text, form):
            raise argparse.ArgumentTypeError(f"'{text}' is not of the form {form}")
        return text

    return convert


class _Formatter(argparse.RawDescriptionHelpFormatter):
    """Show each name of a flag once, with dashes, and the value after the last name, so that lines fit."""

    def _format_action_invocation(self, action: argparse.Action) -> str:
        names = ", ".join(name for name in action.option_strings if "_" not in name)
        value = "" if action.nargs == 0 else self._format_args(action, self._get_default_metavar_for_optional(action))
        value = f"{value.partition(' [')[0]} ..." if action.nargs == "+" else value  # not `X [X ...]`
        return f"{names} {value}".rstrip()


class _Words(argparse.Action):
    """Store several words as a list; commas separate words too."""

    def __call__(
        self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: str | None = None
    ) -> None:
        setattr(namespace, self.dest, [word for value in values for word in separated(value)])


class _Override(argparse.Action):
    """Add the text of a single hyperparameter to the mapping of overrides."""

    def __call__(
        self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: str | None = None
    ) -> None:
        key = str(option_string).removeprefix(OVERRIDE_PREFIX).replace("-", "_")
        setattr(namespace, self.dest, {**getattr(namespace, self.dest, {}), key: values})


class _Parser(argparse.ArgumentParser):
    """A parser that ends the process with one line and exit code 2 for a wrong flag, naming the nearest known one."""

    def _print_message(self, message: str, file: SupportsWrite[str] | None = None) -> None:
        if not is_silent():  # only one process of a machine prints
            super()._print_message(message, file)

    def error(self, message: str) -> NoReturn:
        if message.startswith("unrecognized arguments: "):
            wrong = (message.split(": ", 1)[1].split() or ["''"])[0]
            name = wrong.split("=")[0]
            if instead := REFUSED.get(name.removeprefix("--").replace("-", "_")):
                self.exit(2, f"error: {name} {instead}\n")
            known = [name for name in self._option_string_actions if name.startswith("--") and "_" not in name]
            name = name.replace("_", "-")
            longer = [other for other in known if other.startswith(name) and len(name) > len("--")]
            hint = nearest(name, longer, 0) if len(longer) == 1 else nearest(name, known)
            message = f"unknown flag {wrong}{hint}"
        choice = re.match(r"argument (?:--\S+/)*--(\S+): invalid choice: '(\w+)'", message)
        if choice and (instead := REFUSED.get(f"{choice[1].replace('-', '_')} {choice[2]}")):
            self.exit(2, f"error: --{choice[1]} {choice[2]} {instead}\n")
        self.exit(2, f"error: {message}; see {self.prog} --help\n")
