"""What became of YOLOv5's flags that no script here has."""

from __future__ import annotations

# YOLOv5's flags that are not taken over, with underscores, and values of flags that are: what to do instead. In a
# script that has the flag, it is none of these.
SWEEPS = (
    "is not built in: W&B sweeps tune hyperparameters, each trial on as many devices as you like; see sweep.yaml and "
    "docs/tracking.md#sweeps"
)
SEGMENTS = "is for segmentation, which is not built in; a detector learns from polygon labels by the boxes around them"
REFUSED = {
    **dict.fromkeys(("evolve", "evolve_population", "resume_evolve"), SWEEPS),
    "bucket": "is not built in: copy the run folder with your cloud's own command, such as gsutil rsync or aws s3 sync",
    "quad": "is not built in: train at a larger --imgsz, or with --multi-scale",
    "update": "is not needed: official weights are read as they are",
    "visualize": "is not built in: a forward hook of torch on a layer gives its maps",
    "dnn": "is not built in: OpenCV's DNN module runs ONNX files without the scripts",
    # of export.py
    "optimize": "is not built in, for torch has given up its mobile interpreter: ExecuTorch takes the .pt2 of "
    "--include exported",
    "int8": "is not built in: quantise the ONNX file, as with onnxruntime.quantization or trtexec --int8",
    **dict.fromkeys(("keras", "per_tensor"), "is not built in: onnx2tf makes TensorFlow's files of best.onnx"),
    "workspace": "is not built in: trtexec --memPoolSize=workspace:4096 --onnx=best.onnx takes it",
    "mlmodel": "is not built in: coremltools makes Core ML's files of best.torchscript",
    "cache": "is for train.py; TensorRT's is trtexec --timingCacheFile=FILE --onnx=best.onnx",
    "include engine": "is made of ONNX: --include onnx, then trtexec --onnx=best.onnx --saveEngine=best.engine",
    "include coreml": "is made by coremltools, on macOS: ct.convert of best.torchscript, from --include torchscript",
    **dict.fromkeys(
        ("include saved_model", "include pb", "include tflite"),
        "is made of ONNX: --include onnx, then onnx2tf -i best.onnx, which writes a SavedModel and .tflite files",
    ),
    "include edgetpu": "is made of ONNX: --include onnx, onnx2tf -i best.onnx -oiqt, then edgetpu_compiler best.tflite",
    "include tfjs": "is made of ONNX: --include onnx, onnx2tf -i best.onnx, then tensorflowjs_converter; or run "
    "best.onnx in the browser with onnxruntime-web",
    "include paddle": "is made of ONNX: --include onnx, then x2paddle --framework=onnx --model=best.onnx",
    "task study": "is not built in: call val.py once for each --imgsz, and compare their tables",
    **dict.fromkeys(("mask_ratio", "no_overlap"), SEGMENTS),
    # of classify/train.py
    "model": "is --weights here, or --cfg for a model from scratch, such as --cfg yolov5s-cls.yaml",
    "pretrained": "is not needed: --weights names what to start from, and --weights '' starts from scratch",
    "lr0": "is a hyperparameter: give --hyp.lr0",
    "decay": "is a hyperparameter: give --hyp.weight_decay",
    "cutoff": "is not built in: the layers of a model are those of its YAML; give another one with --cfg",
    "dropout": "is the second argument of the row Classify of the model's YAML; give it with --cfg",
    # of older versions
    "adam": "is --optimizer Adam here",
    "linear_lr": "is what the learning rate does without --cos-lr",
    "cache_images": "is --cache here",
    "notest": "is --noval here",
    "log_imgs": "is --max-images here",
    "log_artifacts": "is --upload-model here",
    "artifact_alias": "is part of the name of an artifact here: --weights wandb:entity/project/name:alias",
}
