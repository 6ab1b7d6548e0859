# The README's commands in a container. GPUs: docker run --gpus all --ipc=host (torch's wheels bring CUDA with them).
#   docker build -t lockstep .
#   docker run --rm lockstep                                          # the built-in job
#   docker run --rm -it --gpus all --ipc=host -v "$PWD/../datasets:/datasets" -v "$PWD/runs:/lockstep/runs" lockstep \
#       python train.py --data data/coco128.yaml --weights yolov5n.pt
FROM python:3.11-slim-bookworm

SHELL ["/bin/bash", "-o", "pipefail", "-c"]
# make for the README's commands, g++ for the operation that DeepSpeed compiles.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ make \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /lockstep
# The packages first: they change less often than the code.
COPY Makefile requirements.txt requirements-dev.txt requirements-deepspeed.txt requirements-export.txt ./
RUN make setup && rm -rf /root/.cache/pip
COPY . .

ENV PATH=/lockstep/.venv/bin:$PATH
CMD ["python", "train.py"]
