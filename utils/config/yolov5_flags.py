"""YOLOv5's flags, and values of flags, that are refused here, with their replacements. Used by the parser."""

from __future__ import annotations

SWEEPS = (
    "is not built in: python -m utils.tune searches by optuna, and W&B sweeps on many machines; see "
    "docs/tracking.md#sweeps"
)
# Keys: a flag with underscores, or a flag and its value. The error message is the flag and the text; a script that has
# the flag accepts it.
REFUSED = {
    **dict.fromkeys(("evolve", "evolve_population", "resume_evolve"), SWEEPS),
    "bucket": "is not built in: copy the run folder with your cloud's own command, such as gsutil rsync or aws s3 sync",
    "quad": "is not built in: train at a larger --imgsz, or with --multi-scale",
    "update": "is not needed: official weights are read as they are",
    "visualize": "is not built in: a PyTorch forward hook on a layer returns its feature maps",
    "dnn": "is not built in: OpenCV's DNN module runs ONNX files without the scripts",
    # YOLOv5's export.py
    "optimize": "is not built in, because PyTorch has dropped its mobile interpreter: ExecuTorch takes the .pt2 of "
    "--include exported",
    "int8": "is not built in: quantise the ONNX file, for example with onnxruntime.quantization or trtexec --int8",
    **dict.fromkeys(("keras", "per_tensor"), "is not built in: onnx2tf converts best.onnx to TensorFlow"),
    "workspace": "is not built in: pass it to trtexec, as --memPoolSize=workspace:4096 --onnx=best.onnx",
    "mlmodel": "is not built in: coremltools converts best.torchscript to Core ML",
    "cache": "is a flag of train.py; TensorRT's timing cache is trtexec --timingCacheFile=FILE --onnx=best.onnx",
    **dict.fromkeys(
        ("include coreml", "include mlmodel"),
        "is made by coremltools on macOS: --include torchscript, then ct.convert of best.torchscript",
    ),
    **dict.fromkeys(
        ("include saved_model", "include pb", "include tflite", "include tensorflow"),
        "is made from ONNX: --include onnx, then onnx2tf -i best.onnx, which writes a SavedModel and .tflite files",
    ),
    "include edgetpu": "is made from ONNX: --include onnx, onnx2tf -i best.onnx -oiqt, edgetpu_compiler best.tflite",
    "include tfjs": "is made from ONNX: --include onnx, onnx2tf -i best.onnx, then tensorflowjs_converter; or run "
    "best.onnx in the browser with onnxruntime-web",
    "include paddle": "is made from ONNX: --include onnx, then x2paddle --framework=onnx --model=best.onnx",
    "include ncnn": "is made from TorchScript: --include torchscript, then pnnx best.torchscript",
    "task study": "is not built in: call val.py once for each --imgsz, and compare their tables",
    # YOLOv5's classify/train.py
    "model": "is --weights here, or --cfg for a model from scratch, such as --cfg yolov5s-cls.yaml",
    "pretrained": "is not needed: --weights names what to start from, and --weights '' starts from scratch",
    "lr0": "is a hyperparameter: give --hyp.lr0",
    "decay": "is a hyperparameter: give --hyp.weight_decay",
    "cutoff": "is not built in: a model has the layers of its YAML; give another YAML with --cfg",
    "dropout": "is the second argument of the row Classify in the model YAML; give your own YAML with --cfg",
    # launchers, and earlier versions of this repository
    "local_rank": "is in the environment: start with torchrun, accelerate launch or --processes",
    "show_processes": "is not needed: the first lines of a run name every process with its host and device",
    "comm_hook powersgd": "is no longer built in: use --comm-hook bf16",
    # older versions of YOLOv5
    "adam": "is --optimizer Adam here",
    "linear_lr": "is the default here: the learning rate is linear without --cos-lr",
    "cache_images": "is --cache here",
    "notest": "is --noval here",
    "log_imgs": "is --max-images here",
    "log_artifacts": "is --upload-model here",
    "partners near": "is no longer built in: --partners window, the default, is as fast and mixes images better",
    "artifact_alias": "is part of the artifact's name here: --weights wandb:entity/project/name:alias",
}
