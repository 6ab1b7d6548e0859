"""The command line: words become the flags of a script. Called by the scripts, predictor.py and settings.py.

Every value, wherever it comes from, passes `typed_values`.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
import typing
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from utils.config.flags import GROUPS, IGNORED, IMPORT_PATH, REFUSED, as_flag, flags_of, typed_values
from utils.config.hyperparameters import OVERRIDE_PREFIX, Hyperparameters, keys_of
from utils.console import log
from utils.errors import UserError, nearest, quoted
from utils.files import IS_INSTALLED, VERSION

if TYPE_CHECKING:
    from _typeshed import DataclassInstance, SupportsWrite

HELP_OF_OVERRIDES = f"{OVERRIDE_PREFIX}KEY VALUE replaces one value of --hyp, such as {OVERRIDE_PREFIX}lr0 0.005"
WRONG_FLAG = 2  # exit code, as argparse's


def given_flags(
    kind: type[DataclassInstance],
    argv: Iterable[str],
    names: Collection[str] = (),
    hyperparameters: Callable[[], Collection[str]] = tuple,
) -> dict[str, Any]:
    """Return the values of the flags in `argv` by field name. Raises `UserError`, whose exit code is argparse's.

    `--flag=False` is left out, and `--flag=True` is the flag alone: so from Python and in sweeps. `names` are the flags
    that are allowed, all if empty. `hyperparameters` returns the names that stand for flags such as --hyp.lr0, and is
    called only for unknown names.
    """
    options = [option for option in flags_of(kind) if not names or option.name in names]
    known = [as_flag(name) for option in options for name in (option.name, *option.metadata["aliases"])]
    others, overrides = list[str](), dict[str, str]()
    words = iter(argv)
    for word in words:
        flag, has_value, value = word.partition("=")
        name = flag.removeprefix("--").replace("-", "_")
        if flag.startswith("--") and as_flag(name) not in known and name in hyperparameters():
            flag = f"{OVERRIDE_PREFIX}{name}"
        is_override = flag.startswith(OVERRIDE_PREFIX) and "overrides" in kind.__dataclass_fields__
        if not has_value and (is_override or (flag.startswith("--") and name in IGNORED)):
            value = next(words, "--")  # not by argparse, which takes -1e-1 for a flag
        if is_override and value.startswith("--"):
            raise UserError(f"{flag} needs a value; see --help", WRONG_FLAG)
        if is_override:
            overrides[flag.removeprefix(OVERRIDE_PREFIX).replace("-", "_")] = value
        elif (names or value not in IGNORED.get(name, ())) and not (value == "False" and as_flag(name) in known):
            rest = "" if value == "True" and as_flag(name) in known else word.removeprefix(flag)
            others.append(f"{as_flag(name)}{rest}" if flag.startswith("--") else word)
    values, unknown = _build_parser(kind, options).parse_known_args(others)
    if unknown:
        flag = unknown[0].partition("=")[0]
        name, reason = flag[2:].replace("-", "_"), f"is not a flag{nearest(flag, known)}; see --help"
        if names:  # a call from Python
            reason = f"is not an argument{nearest(name, names)}; use {', '.join(names)}"
            raise UserError(f"{name}= {REFUSED.get(name, reason)}", WRONG_FLAG)
        if "overrides" in kind.__dataclass_fields__ and name in keys_of(Hyperparameters):
            reason = f"is a hyperparameter: give {OVERRIDE_PREFIX}{name}"
        raise UserError(f"{quoted(flag)} {REFUSED.get(name, reason)}", WRONG_FLAG)
    try:
        flags = typed_values(kind, vars(values), as_flag)
    except UserError as error:
        raise UserError(str(error), WRONG_FLAG) from None
    return {**flags, "overrides": overrides} if overrides else flags


def _build_parser(kind: type[DataclassInstance], options: Sequence[dataclasses.Field[Any]]) -> argparse.ArgumentParser:
    examples = "".join(f"\n  {example}" for example in getattr(kind, "examples", ()))
    parser = _Parser(
        usage="%(prog)s [flags]",
        description=f"examples:{examples}" if examples else kind.__doc__,
        epilog=HELP_OF_OVERRIDES if "overrides" in kind.__dataclass_fields__ else None,
        formatter_class=_Formatter,
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"lockstep {VERSION}")
    hints = typing.get_type_hints(kind)
    groups = {title: parser.add_argument_group(title) for title in GROUPS}  # empty ones are not shown
    for option in options:
        flags = map(as_flag, (option.name, *option.metadata["aliases"]))
        default = " ".join(map(str, option.default)) if isinstance(option.default, tuple) else repr(option.default)
        recipe = ", or the recipe's" if "hyp" in option.metadata["suggested"] else ""
        text = f"{option.metadata['help']} (default {default or 'none'}{recipe})"
        groups[option.metadata["group"]].add_argument(
            *flags, dest=option.name, help=text, **_argument(hints[option.name], option.metadata)
        )
    return parser


def _argument(hint: Any, metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of `add_argument` that say how many words a flag takes; `typed_values` reads the words."""
    if hint is bool:
        return {"action": "store_true"}
    if typing.get_origin(hint) is tuple:
        return {"nargs": "+"}
    few = metadata["choices"] and not metadata["comma_separated"] and IMPORT_PATH not in metadata["choices"]
    metavar = {"metavar": f"{{{','.join(metadata['choices'])}}}"} if few else {}
    return {**metavar, "nargs": "?", "const": metadata["const"]} if metadata["const"] is not None else metavar


class _Formatter(argparse.RawDescriptionHelpFormatter):
    """Show the value of a flag after the last of its names, so that lines fit."""

    def _format_action_invocation(self, action: argparse.Action) -> str:
        value = "" if action.nargs == 0 else self._format_args(action, self._get_default_metavar_for_optional(action))
        value = f"{value.partition(' [')[0]} ..." if action.nargs == "+" else value  # not `X [X ...]`
        return f"{', '.join(action.option_strings)} {value}".rstrip()


class _Parser(argparse.ArgumentParser):
    """A parser that raises `UserError`, and prints its help on one process of a machine."""

    def _print_message(self, message: str, file: SupportsWrite[str] | None = None) -> None:
        if IS_INSTALLED:  # there the scripts are commands: see __main__.py
            message = re.sub(r"(?:python )?\b(train|val|detect|export)\.py", r"lockstep \1", message)
        if log.is_main:  # only one process of a machine prints
            super()._print_message(message, file)

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; see --help", WRONG_FLAG)
