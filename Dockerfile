# The README's installation in a container. GPUs: docker run --gpus all --ipc=host (torch's wheels bring CUDA with them).
#   docker build -t lockstep .
#   docker run --rm lockstep                                          # the built-in job
#   docker run --rm -it --gpus all --ipc=host -v "$PWD/../datasets:/datasets" -v "$PWD/runs:/lockstep/runs" lockstep \
#       python train.py --data data/coco128.yaml --weights yolov5n.pt
# Kubernetes, Kubeflow, SkyPilot: docs/clusters.md
# For DeepSpeed or exports: docker build --build-arg REQUIREMENTS=requirements-deepspeed.txt -t lockstep .
FROM python:3.11-slim-bookworm

SHELL ["/bin/bash", "-o", "pipefail", "-c"]
# g++ for torch.compile, and for the kernel of suppression (docs/gpu.md).
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /lockstep
# The packages first: they change less often than the code.
ARG REQUIREMENTS=requirements.txt
COPY requirements*.txt ./
RUN pip install --no-cache-dir -r requirements.txt -r "$REQUIREMENTS"
COPY . .

CMD ["python", "train.py"]
