"""`Fitness`: the number by which epochs are compared, a sum of metrics as --fitness weights them. Used by train.py."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

from utils.config.values import named_numbers
from utils.errors import UserError, nearest, shortened, shown
from utils.summary import Summary


@dataclass(frozen=True)
class Fitness:
    """A weighted sum of metrics; without weights the fitness of the task.

    Attributes:
        weights: weight of each metric, named as in results.csv without `metrics/`
        class_weights: weight of each metric of a class, by metric and class as in `Summary.by_class`
    """

    weights: dict[str, float] = field(default_factory=dict)
    class_weights: dict[tuple[str, str], float] = field(default_factory=dict)

    @classmethod
    def parsed(
        cls, text: str, metrics: Sequence[str], class_metrics: Sequence[str], classes: Collection[str]
    ) -> Fitness:
        """Read --fitness, such as `recall=1` or `mAP_0.5=0.5,AP(cat)=0.5`; '' is the task's own fitness.

        Raises `UserError` for another form, an unknown metric or class, and weights that are all 0.

        Args:
            metrics: the task's metrics over all classes
            class_metrics: the task's metrics of single classes
            classes: class names
        """
        weights: dict[str, float] = {}
        by_class: dict[tuple[str, str], float] = {}
        known_of_classes = {f"{metric}({name})": (metric, name) for metric in class_metrics for name in classes}
        try:
            terms = named_numbers(text)
        except ValueError:
            raise UserError(
                f"--fitness {shown(text)}: it is not of the form METRIC=WEIGHT,METRIC=WEIGHT, such as "
                "mAP_0.5:0.95=0.9,mAP_0.5=0.1"
            ) from None
        for name, weight in ((name.removeprefix("metrics/"), weight) for name, weight in terms):
            if name in weights or known_of_classes.get(name) in by_class:
                raise UserError(f"--fitness {shown(text)}: '{name}' occurs twice; add the weights")
            if name in metrics:
                weights[name] = weight
            elif name in known_of_classes:
                by_class[known_of_classes[name]] = weight
            else:
                known = ", ".join([*metrics, *(f"{metric}(CLASS)" for metric in class_metrics)])
                of = f" of the classes {shortened(', '.join(classes))}" if class_metrics else ""
                raise UserError(
                    f"--fitness {shown(text)}: unknown metric '{name}'"
                    f"{nearest(name, [*metrics, *known_of_classes])}; known are {known}{of}"
                )
        if text and not any([*weights.values(), *by_class.values()]):
            raise UserError(f"--fitness {shown(text)}: all weights are 0, so all epochs are equal; give another number")
        return cls(weights, by_class)

    @property
    def highest(self) -> float:
        """The fitness if all metrics are 1, or 0 if their weights are negative; 1 if all weights are negative."""
        return sum(max(weight, 0.0) for weight in (*self.weights.values(), *self.class_weights.values())) or 1.0

    def check_labels(self, labelled: Collection[str]) -> None:
        """Raise `UserError` if --fitness names a class that has no label for validation.

        Args:
            labelled: names of the classes that have labels
        """
        for metric, name in self.class_weights:
            if name not in labelled:
                raise UserError(
                    f"--fitness: {metric}({name}) has no value, because no validation image has a label '{name}'; name "
                    "another metric, or add images to val: of the data YAML"
                )

    def of(self, summary: Summary) -> Summary:
        """Return the summary of an epoch with this fitness, also at the end of its console line; NaN becomes -inf."""
        if not self.weights and not self.class_weights:
            return summary if summary.fitness >= float("-inf") else replace(summary, fitness=float("-inf"))
        value = sum(weight * summary.metrics[name] for name, weight in self.weights.items())
        value += sum(
            weight * summary.by_class[metric].get(name, 0.0) for (metric, name), weight in self.class_weights.items()
        )
        headline = {**(summary.headline or summary.metrics), "fitness": value}
        return replace(summary, fitness=max(float("-inf"), value), highest_fitness=self.highest, headline=headline)
