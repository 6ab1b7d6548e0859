"""What an engine makes of a file of accelerate_configs: the container of each machine, and which pods start again.

Replaced are the image by this checkout, its Python by this one, GPUs by the CPU, volumes and buckets by folders.
"""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from tests.clusters.pods import Pod
from tests.machines import CONFIGS
from utils.files import ROOT

PYTHON_FOLDER = str(Path(sys.executable).parent)
POLL_SECONDS = 0.05
BACKOFF_SECONDS = 10.0


class Container(NamedTuple):
    """A machine's container: host name, the names that it can resolve, command, environment, and grace period."""

    host: str
    names: Mapping[str, str]  # to addresses
    command: Sequence[str]
    variables: dict[str, str]
    grace: float = 30.0  # seconds between SIGTERM and SIGKILL

    def environment(self) -> dict[str, str]:
        """Return the variables of the image, here of this process, and the container's own."""
        path = f"{PYTHON_FOLDER}:{os.environ['PATH']}"
        return {**os.environ, "PATH": path, "CUDA_VISIBLE_DEVICES": "", **self.variables}


def documents(name: str) -> dict[str, Any]:
    """Return the documents of a file by kind."""
    return {document["kind"]: document for document in yaml.safe_load_all((CONFIGS / name).read_text())}


def kubernetes(addresses: Sequence[str], flags: Sequence[str]) -> list[Container]:
    """Return the containers of an Indexed Job. Pods have names only by a headless Service that selects them."""
    objects = documents("kubernetes.yaml")
    job, service = objects["Job"], objects["Service"]
    name, pod = job["metadata"]["name"], job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert job["spec"]["completions"] == job["spec"]["parallelism"] == len(addresses)
    names = {}
    selected = service["spec"]["selector"].items() <= {"batch.kubernetes.io/job-name": name, "job-name": name}.items()
    if selected and service["spec"]["clusterIP"] == "None" and service["metadata"]["name"] == pod["subdomain"]:
        names = {f"{name}-{index}.{pod['subdomain']}": address for index, address in enumerate(addresses)}
    variables = {one["name"]: one["value"] for one in container["env"] if "value" in one}
    return [
        Container(
            host=f"{name}-{index}",
            names=names,
            command=[*container["command"], *container["args"], *flags],
            # To count GPUs takes seconds, which kubeflow and skypilot show.
            variables={"JOB_COMPLETION_INDEX": str(index), "PROCESSES_PER_MACHINE": "1", **variables},
            grace=pod["terminationGracePeriodSeconds"],
        )
        for index in range(len(addresses))
    ]


def kubeflow(addresses: Sequence[str], flags: Sequence[str]) -> list[Container]:
    """Return the containers of a TrainJob on the runtime torch-distributed, with its plugin's variables."""
    job = documents("kubeflow.yaml")["TrainJob"]
    trainer, name = job["spec"]["trainer"], job["metadata"]["name"]
    (patch,) = job["spec"]["runtimePatches"][0]["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    hosts = [f"{name}-{patch['name']}-0-{index}" for index in range(len(addresses))]
    assert trainer["numNodes"] == len(addresses)
    shared = {
        "PET_NNODES": str(trainer["numNodes"]),
        "PET_NPROC_PER_NODE": "auto",  # there are GPUs in resourcesPerNode
        "PET_MASTER_ADDR": f"{hosts[0]}.{name}",
        "PET_MASTER_PORT": "29400",
    }
    return [
        Container(
            host=host,
            names={f"{host}.{name}": address for host, address in zip(hosts, addresses, strict=True)},
            command=[*trainer["command"], *trainer["args"], *flags],
            variables={**shared, "PET_NODE_RANK": str(index), "JOB_COMPLETION_INDEX": str(index)},
            grace=patch["template"]["spec"]["template"]["spec"]["terminationGracePeriodSeconds"],
        )
        for index, host in enumerate(hosts)
    ]


def skypilot(addresses: Sequence[str], flags: Sequence[str]) -> list[Container]:
    """Return what SkyPilot runs on each node, in bash, with the variables of its documentation."""
    task = yaml.safe_load((CONFIGS / "skypilot.yaml").read_text())
    assert task["num_nodes"] == len(addresses)
    script = f"{task['run'].rstrip()} {shlex.join(flags)}"
    for image, here in (("cd /lockstep\n", f"cd {shlex.quote(str(ROOT))}\n"), ("/usr/local/bin", PYTHON_FOLDER)):
        assert image in script
        script = script.replace(image, here)
    shared = {
        "SKYPILOT_NUM_NODES": str(task["num_nodes"]),
        "SKYPILOT_NODE_IPS": "\n".join(addresses),
        "SKYPILOT_NUM_GPUS_PER_NODE": "0",  # as on machines without GPUs
    }
    return [
        Container(f"node{rank}", {}, ["bash", "-c", script], {**shared, "SKYPILOT_NODE_RANK": str(rank)})
        for rank in range(len(addresses))
    ]


@dataclass
class IndexedJob:
    """Kubernetes' controller of the Job in kubernetes.yaml. start: starts an index's pod.

    A pod is replaced `BACKOFF_SECONDS` after its end, and after twice as long with each further failure of its index,
    those that are not counted included.
    """

    start: Callable[[int], Pod]
    spec: Mapping[str, Any] = field(default_factory=lambda: documents("kubernetes.yaml")["Job"]["spec"])
    failures: Counter[int] = field(default_factory=Counter)  # counted ones, by index
    ignored: Counter[int] = field(default_factory=Counter)  # failures that are not counted
    starts: Counter[int] = field(default_factory=Counter)
    pods: dict[int, Pod] = field(default_factory=dict)
    disrupted: set[int] = field(default_factory=set)  # indices whose pod has the condition DisruptionTarget

    def begin(self) -> None:
        """Start all pods."""
        for index in range(self.spec["completions"]):
            self._start(index)

    def evict(self, index: int, grace: float) -> None:
        """Evict a pod: SIGTERM to its first process, and SIGKILL to all after `grace` seconds."""
        self.disrupted.add(index)
        self.pods[index].evict(grace)

    def wait(self) -> str:
        """Start pods again as the policy says; return the job's last condition."""
        succeeded: set[int] = set()
        due: dict[int, float] = {}  # when a failed pod is replaced
        while len(succeeded) < len(self.pods):
            for index, pod in self.pods.items():
                code = pod.poll()
                if code is None or index in succeeded:
                    continue
                if code == 0:
                    succeeded.add(index)
                    continue
                if index in due:
                    if time.monotonic() >= due[index]:
                        del due[index]
                        self._start(index)
                    continue
                action = self._action(index, code)
                self.failures[index] += action == "Count"
                self.ignored[index] += action == "Ignore"
                if action == "FailJob" or self.failures[index] > self.spec["backoffLimitPerIndex"]:
                    assert self.spec["maxFailedIndexes"] == 0
                    for other in self.pods.values():
                        other.kill()
                    return "Failed"
                times = self.failures[index] + self.ignored[index]
                due[index] = time.monotonic() + BACKOFF_SECONDS * 2 ** (times - 1)
            time.sleep(POLL_SECONDS)
        return "Complete"

    def _start(self, index: int) -> None:
        self.disrupted.discard(index)
        self.starts[index] += 1
        self.pods[index] = self.start(index)

    def _action(self, index: int, code: int) -> str:
        """Return the action of the first rule that a failed pod matches; by default it counts."""
        for rule in self.spec["podFailurePolicy"]["rules"]:
            conditions = [condition["type"] for condition in rule.get("onPodConditions", ())]
            if code in rule.get("onExitCodes", {}).get("values", ()):
                return str(rule["action"])
            if index in self.disrupted and "DisruptionTarget" in conditions:
                return str(rule["action"])
        return "Count"
