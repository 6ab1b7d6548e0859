"""A user's augmentations: the Python file or the YAML of --augmentations, applied at named places of the pipeline.

Called by the data sets. A callable gets the parts that its parameters are named after (`PARTS`), and a generator as
`rng`; it returns the parts that it takes, in the same order. Everything that it draws depends on (seed, epoch,
position) alone.
"""

from __future__ import annotations

import inspect
import os
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import cv2
import numpy as np
import yaml

from data.augment import Sample
from data.polygons import Polygons
from data.transforms import torch_seeded_by
from utils.errors import UserError, first_line, nearest, shown
from utils.files import looked_for, read_yaml
from utils.user_code import explained, imported, trust

FLAG = "--augmentations"
LIST = "AUGMENTATIONS"  # name in a Python file of a list, or of lists by place
# Each image as it is loaded, before it is mixed, cropped and warped; and the finished item.
PLACES = ("image", "item")
PARTS = ("image", "boxes", "classes", "polygons")
GENERATOR = "rng"
EDGE_TOLERANCE_PIXELS = 0.01  # how far a box may be outside of its image by rounding


class Labelling(NamedTuple):
    """What the items of a data set have besides images.

    Attributes:
        classes: number of classes of the boxes, 0 if there are no boxes
        outlines: whether objects have outlines
    """

    classes: int = 0
    outlines: bool = False


NO_LABELS = Labelling()


@dataclass(frozen=True)
class Step:
    """A user's callable.

    Attributes:
        name: name of the callable, for messages
        where: its place in its file for messages, such as `my.py, line 3`
        call: the callable itself
        parts: parts that it takes, in the order of its parameters
        draws: whether it takes the generator
    """

    name: str
    where: str
    call: Callable[..., Any]
    parts: tuple[str, ...]
    draws: bool

    def __call__(self, given: Mapping[str, Any], rng: np.random.Generator, classes: int, image: str) -> dict[str, Any]:
        """Return `given` with the values that the callable returns, checked. Raises `UserError`.

        Args:
            given: values by part
            classes: number of classes
            image: the image's name, for messages
        """
        shape, bounds = given["image"].shape, _bounds(given)
        arguments: dict[str, Any] = {part: given[part] for part in self.parts}
        with explained(self.where, f", in the augmentation '{self.name}' of {image}"):
            returned = self.call(**arguments, **({GENERATOR: rng} if self.draws else {}))
        try:
            values = self._by_part(returned)
            checked = {part: CHECKS[part](value) for part, value in values.items()}
            after = {**given, **checked}
            _check_image(after["image"], shape)
            _check_counts(after)
            _check_boxes(after["boxes"], bounds)
            if wrong := [k for k in after["classes"].tolist() if not 0 <= k < classes]:
                raise ValueError(f"class {wrong[0]}, and classes are 0 to {classes - 1}")
        except ValueError as error:
            raise UserError(f"{self.where}: the augmentation '{self.name}' returned {error}, for {image}") from None
        return after

    def _by_part(self, returned: Any) -> dict[str, Any]:
        if len(self.parts) == 1:
            return {self.parts[0]: returned}
        if not isinstance(returned, (tuple, list)) or len(returned) != len(self.parts):
            raise ValueError(f"{_described(returned)} instead of the parts that it takes, ({', '.join(self.parts)})")
        return dict(zip(self.parts, returned, strict=True))


def _bounds(given: Mapping[str, Any]) -> np.ndarray:
    """Return the xyxy that returned boxes must be in: the image, extended to the boxes before the call."""
    height, width = given["image"].shape[:2]
    boxes = given["boxes"]
    low = boxes[:, :2].min(0, initial=0)
    high = np.concatenate((boxes[:, 2:], [[width, height]])).max(0)
    return np.concatenate((low - EDGE_TOLERANCE_PIXELS, high + EDGE_TOLERANCE_PIXELS))


def _described(value: Any) -> str:
    if isinstance(value, np.ndarray):
        return f"an array {value.dtype} {value.shape}"
    return f"{len(value)} values" if isinstance(value, (tuple, list)) else shown(value)


def _numbers(value: Any, columns: int, what: str) -> np.ndarray:
    """Return rows of numbers, float32 (k, columns). Raises ValueError with a part of a sentence.

    Args:
        what: noun for the rows, for the error
    """
    try:
        rows = np.array(value, np.float32)
    except (TypeError, ValueError):
        raise ValueError(f"{what} that are not rows of {columns} numbers: {shown(value)}") from None
    rows = rows.reshape(0, columns) if not rows.size else rows
    if rows.ndim != 2 or rows.shape[1] != columns:
        raise ValueError(f"{what} of shape {rows.shape} instead of (k, {columns})")
    if not np.isfinite(rows).all():
        raise ValueError(f"{what} with NaN or infinite coordinates")
    return rows


def _image_of(value: Any) -> np.ndarray:
    if not isinstance(value, np.ndarray) or value.dtype != np.uint8:
        raise ValueError(f"{_described(value)} as the image instead of an array uint8 (height, width, 3)")
    return np.ascontiguousarray(value)


def _boxes_of(value: Any) -> np.ndarray:
    return _numbers(value, 4, "boxes")


def _classes_of(value: Any) -> np.ndarray:
    classes = _numbers(np.reshape(value, (-1, 1)), 1, "classes")
    if (classes != classes.round()).any():
        raise ValueError("classes that are not whole numbers")
    return classes[:, 0].astype(np.int64)


def _polygons_of(value: Any) -> list[np.ndarray]:
    if not isinstance(value, (list, tuple)):
        raise ValueError(f"{_described(value)} as polygons instead of a list of arrays (points, 2)")
    return [_numbers(points, 2, "a polygon's points") for points in value]


CHECKS: Mapping[str, Callable[[Any], Any]] = dict(
    zip(PARTS, (_image_of, _boxes_of, _classes_of, _polygons_of), strict=True)
)


def _check_image(image: np.ndarray, shape: tuple[int, ...]) -> None:
    if image.shape != shape:
        raise ValueError(f"an image of shape {image.shape} instead of {shape}; the size must not change")


def _check_counts(values: Mapping[str, Any]) -> None:
    counts = {part: len(values[part]) for part in PARTS[1:]}
    if len(set(counts.values())) > 1:
        listed = ", ".join(f"{count} {part}" for part, count in counts.items())
        raise ValueError(f"an image with {listed}; take all three and return as many of each")


def _check_boxes(boxes: np.ndarray, bounds: np.ndarray) -> None:
    beyond = (boxes[:, :2] < bounds[:2]).any(1) | (boxes[:, 2:] > bounds[2:]).any(1)
    turned = (boxes[:, 2:] < boxes[:, :2]).any(1)
    for wrong, what in (
        (beyond, "outside of the image; clip it, or leave it out"),
        (turned, "whose x2 or y2 is less than x1 or y1"),
    ):
        if wrong.any():
            box = ", ".join(f"{value:g}" for value in boxes[wrong.argmax()].tolist())
            raise ValueError(f"the box ({box}) {what}")


@contextmanager
def seeded(rng: np.random.Generator) -> Iterator[None]:
    """Seed the global generators of Python, numpy and torch from `rng` in a block, for code that draws from them."""
    with ExitStack() as stack:
        stack.callback(random.setstate, random.getstate())
        stack.callback(np.random.set_state, np.random.get_state())  # noqa: NPY002
        random.seed(int(rng.integers(2**63)))
        np.random.seed(int(rng.integers(2**32)))  # noqa: NPY002
        stack.enter_context(torch_seeded_by(rng))
        yield


@dataclass(frozen=True)
class OwnAugmentations:
    """A user's callables by place; there are none without a file."""

    file: str = ""
    labelling: Labelling = NO_LABELS
    places: Mapping[str, Sequence[Step]] = field(default_factory=dict)

    def __reduce__(self) -> tuple[Any, ...]:
        return read_augmentations, (self.file, self.labelling)  # called by loader processes that do not fork

    def __bool__(self) -> bool:
        return any(self.places.values())

    @property
    def messages(self) -> list[str]:
        """A line for the console with the callables in order, if there are any."""
        texts = [f"{', '.join(s.name for s in steps)} (each {place})" for place, steps in self.places.items() if steps]
        return [f"augmentations of {self.file}: {'; '.join(texts)}"] if texts else []

    def apply(self, place: str, sample: Sample, rng: np.random.Generator, image: str) -> Sample:
        """Return a sample changed by the callables of a place; parts that none of them takes do not change.

        Raises `UserError`.

        Args:
            image: the image's name, for messages
        """
        steps = self.places.get(place, ())
        if not steps:
            return sample
        outlines = sample.polygons.outlines() if sample.polygons else [np.zeros((0, 2))] * len(sample.boxes)
        values: dict[str, Any] = {
            "image": cv2.cvtColor(sample.image, cv2.COLOR_BGR2RGB),
            "boxes": sample.boxes.astype(np.float32),
            "classes": sample.classes.astype(np.int64),
            "polygons": [outline.astype(np.float32) for outline in outlines],
        }
        with seeded(rng):
            for step in steps:
                values = step(values, rng, self.labelling.classes, image)
        back: dict[str, Callable[[Any], Any]] = {
            "image": lambda pixels: cv2.cvtColor(pixels, cv2.COLOR_RGB2BGR),
            "boxes": lambda boxes: boxes,
            "classes": lambda classes: classes.astype(np.float32),
            "polygons": lambda outlines: None if sample.polygons is None else Polygons.of(outlines),
        }
        taken = {part for step in steps for part in step.parts}
        return sample._replace(**{part: back[part](values[part]) for part in taken})


NO_AUGMENTATIONS = OwnAugmentations()


def read_augmentations(
    file: str, labelling: Labelling, is_named: bool = True, named_by: str = "the run's settings.yaml"
) -> OwnAugmentations:
    """Read the file of --augmentations; a Python file is run. Raises `UserError` with file and line.

    Args:
        file: path of the file, '' for none
        labelling: labels that the callables may take
        is_named: whether the user names the file now; otherwise Python is run only if this user has run the same before
        named_by: who names the file if `is_named` is false, for messages
    """
    if not file:
        return NO_AUGMENTATIONS
    path = Path(file).resolve()
    if not os.path.isfile(path) or path.suffix not in (".py", ".yaml", ".yml"):
        raise UserError(f"{FLAG} {file} is not a .py or .yaml file; give the path of one{looked_for(Path(file))}")
    allow = partial(trust, flag=f"{FLAG} {file}", is_named=is_named, named_by=named_by)
    places = _of_python(path, allow, labelling) if path.suffix == ".py" else _of_yaml(path, allow, labelling)
    if not any(places.values()):
        raise UserError(f"{path} lists no augmentation; add one, or leave {FLAG} out")
    return OwnAugmentations(file, labelling, places)


def _of_python(path: Path, allow: Callable[[Path], None], labelling: Labelling) -> dict[str, list[Step]]:
    """Return the steps of a Python file's `AUGMENTATIONS`.

    Args:
        allow: raises `UserError` unless a Python file may be run; see `trust`
    """
    allow(path)
    with imported(path, FLAG) as module:
        listed = getattr(module, LIST, None)
        listed = {"item": listed} if isinstance(listed, (list, tuple)) else listed
        if not isinstance(listed, dict):
            raise UserError(f"{path} has no list {LIST} of functions; write {LIST} = [my_function]")
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
        line = next((number for number, text in enumerate(lines, 1) if text.startswith(LIST)), 1)
        where = f"{path}, line {line}"
        _check_places(listed, where)
        return {place: [_step(call, path, where, labelling) for call in listed[place]] for place in listed}


def _check_places(listed: Mapping[str, Any], where: str) -> None:
    for place, calls in listed.items():
        if place not in PLACES:
            raise UserError(
                f"{where}: '{place}' is not a place of augmentations{nearest(str(place), PLACES)}; name "
                f"{' or '.join(PLACES)}"
            )
        if not isinstance(calls, (list, tuple)):
            raise UserError(f"{where}: `{place}` must be a list of augmentations, not {shown(calls)}")


def _of_yaml(path: Path, allow: Callable[[Path], None], labelling: Labelling) -> dict[str, list[Step]]:
    """Return the steps of a YAML: `item:` or `image:`, a list of `NAME: {arguments}`."""
    content = read_yaml(path)
    _check_places(content, str(path))
    root: Any = yaml.compose(path.read_text(encoding="utf-8-sig"))
    lines = {
        (key.value, number): f"{path}, line {node.start_mark.line + 1}"
        for key, value in root.value
        for number, node in enumerate(value.value)
        if key.value in content
    }
    return {
        place: [
            _of_entry(entry, path, lines.get((place, number), str(path)), allow, labelling)  # none if merged by `<<`
            for number, entry in enumerate(entries)
        ]
        for place, entries in content.items()
    }


def _of_entry(entry: Any, path: Path, where: str, allow: Callable[[Path], None], labelling: Labelling) -> Step:
    """Return the step of a YAML's entry, a transform of albumentations, or a function or a class as FILE.py:NAME."""
    name, arguments = next(iter(entry.items())) if isinstance(entry, dict) and len(entry) == 1 else (entry, {})
    arguments = {} if arguments is None else arguments
    if not isinstance(name, str) or not isinstance(arguments, dict):
        raise UserError(f"{where}: {shown(entry)} is not `NAME: {{arguments}}`; fix it")
    code, _, word = name.rpartition(":")
    if not code:
        from data.albumentations_adapter import named_transform

        make = named_transform(name, where)
        return _step(_made(make, arguments, name, where), path, where, labelling)
    file = (path.parent / code).resolve()
    if not os.path.isfile(file) or file.suffix != ".py":
        raise UserError(f"{where}: {code} is not a Python file; write FILE.py:NAME{looked_for(file)}")
    allow(file)
    with imported(file, FLAG) as module:
        return _of_module(module, word, arguments, file, where, labelling)


def _of_module(
    module: ModuleType, word: str, arguments: dict[str, Any], file: Path, where: str, labelling: Labelling
) -> Step:
    known = [name for name, value in vars(module).items() if callable(value)]
    if word not in known:
        raise UserError(f"{where}: {file} has no function or class '{word}'{nearest(word, known)}; fix the name")
    call = getattr(module, word)
    if inspect.isclass(call):
        call = _made(call, arguments, word, where)
    elif arguments:
        call = partial(call, **arguments)
    return _step(call, file, where, labelling)


def _made(kind: Callable[..., Any], arguments: Mapping[str, Any], name: str, where: str) -> Any:
    try:
        return kind(**arguments)
    except Exception as error:
        raise UserError(
            f"{where}: {name} refuses its arguments ({type(error).__name__}: {first_line(error)}); fix them"
        ) from error


def _step(call: Any, file: Path, where: str, labelling: Labelling) -> Step:
    """Return a callable as a step. Raises `UserError`.

    Args:
        file: file that has or lists the callable
        where: line that lists the callable, for messages about one whose own line is unknown
    """
    named: Any = call.func if isinstance(call, partial) else call
    name = getattr(named, "__name__", type(named).__name__)
    from data.albumentations_adapter import adapted

    call = adapted(call, bool(labelling.classes))
    if not callable(call):
        raise UserError(f"{where}: {shown(call)} is not a function; list functions, or objects with a `__call__`")
    code = getattr(named if hasattr(named, "__code__") else type(named).__call__, "__code__", None)
    if code is not None and Path(code.co_filename).resolve() == file:
        where = f"{file}, line {code.co_firstlineno}"
    try:
        parameters = inspect.signature(call).parameters.values()
    except (TypeError, ValueError):
        raise UserError(f"{where}: the parameters of '{name}' are unknown; wrap it in a function") from None
    required = [each.name for each in parameters if each.default is each.empty and each.kind is not each.VAR_KEYWORD]
    if unknown := [word for word in required if word not in (*PARTS, GENERATOR)]:
        raise UserError(
            f"{where}: the augmentation '{name}' takes '{unknown[0]}'; name its parameters "
            f"{', '.join(PARTS)} and {GENERATOR}, as many as it needs"
        )
    parts = tuple(word for word in required if word in PARTS)
    if not parts:
        raise UserError(f"{where}: the augmentation '{name}' takes none of {', '.join(PARTS)}; give it such parameters")
    if not labelling.classes and parts != ("image",):
        other = next(part for part in parts if part != "image")
        raise UserError(f"{where}: the augmentation '{name}' takes {other}, but this data set has none; take image")
    if labelling.outlines and ("boxes" in parts) != ("polygons" in parts):
        has, lacks = ("boxes", "polygons") if "boxes" in parts else ("polygons", "boxes")
        raise UserError(
            f"{where}: the augmentation '{name}' takes {has} without {lacks}, and this data set has both; take both, "
            "so that they agree"
        )
    return Step(name, where, call, parts, GENERATOR in required)
