"""Make a weight file of a model of transformers: `python -m examples.dfine.convert FOLDER_OR_NAME dfine-nano.pt`.

config.json gives the model YAML and the classes, README.md the licence. Run it in the repository's folder.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

from models.loading import transfer
from models.weights import UNKNOWN, Origin, read_weights
from utils.checkpoint import serialised, weights_content
from utils.distributed.failure import run_main
from utils.errors import UserError

from .task import DFineRecipe, DFineTask

IMAGE_SIZE = 640  # pixels: of all published models


def convert(source: str, target: str) -> None:
    """Write `target` from a folder, or from a repository of the Hugging Face Hub, by its name. Raises `UserError`."""
    folder = Path(source)
    if not folder.is_dir():
        from huggingface_hub import snapshot_download

        folder = Path(snapshot_download(source, allow_patterns=["*.json", "README.md", "model.safetensors"]))
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    names = {int(number): str(name) for number, name in config.pop("id2label").items()}
    yaml = {"task": "dfine", "config": {key: value for key, value in config.items() if key != "label2id"}}
    weights = read_weights(folder / "model.safetensors")
    model, state = (
        DFineTask(names, DFineRecipe()).build_model(yaml, IMAGE_SIZE, source),
        DFineTask.renamed(weights.state),
    )
    transfer(model, state)
    if missing := [name for name in model.state_dict() if name not in state and "num_batches" not in name]:
        raise UserError(f"{source} lacks {len(missing)} tensors of this network, such as {missing[0]}")
    card = (folder / "README.md").read_text(encoding="utf-8") if (folder / "README.md").is_file() else ""
    licence = re.search(r"^license: *(\S+)", card, re.MULTILINE)
    origin = Origin(licence[1] if licence else UNKNOWN, weights.origin.files).content()
    settings = {"imgsz": IMAGE_SIZE, "task_file": str(Path(__file__).parent)}
    Path(target).write_bytes(serialised(weights_content(model, model.yaml, names, settings, **origin)))


if __name__ == "__main__":
    run_main(lambda: convert(*sys.argv[1:3]))
