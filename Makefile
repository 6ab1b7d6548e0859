# Each target is enough on a fresh machine with Python >= 3.10; all of them may be repeated.
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
STAMP := $(VENV)/.installed

.PHONY: setup train test test-long test-gpu test-gpu2 lint bench bench-processes bench-saving bench-versus bench-gpus

setup: $(STAMP)

# The stamp is written last: an interrupted installation is done again.
$(STAMP): requirements.txt requirements-dev.txt requirements-deepspeed.txt requirements-export.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
		{ echo "error: Python 3.10 or newer is needed; name one with make PYTHON=python3.11 $(MAKECMDGOALS)" >&2; exit 1; }
	@test -x $(RUN) || $(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet --upgrade pip
	$(RUN) -m pip install --quiet -r requirements.txt -r requirements-dev.txt
	@touch $@

train: setup
	$(RUN) train.py

# Two at a time, a file's tests one after another: they share what they have trained.
test: setup
	$(RUN) -m pytest -n 2 --dist loadfile -m "not long and not gpu and not gpu2"

test-long: setup
	$(RUN) -m pytest -m "long and not gpu and not gpu2"

test-gpu: setup
	$(RUN) -m pytest -m gpu

test-gpu2: setup
	$(RUN) -m pytest -m gpu2

lint: setup
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	@test ! -x $(VENV)/bin/hadolint || $(VENV)/bin/hadolint Dockerfile

bench: setup
	$(RUN) -m benchmarks.accuracy

bench-processes: setup
	$(RUN) -m benchmarks.processes

bench-saving: setup
	$(RUN) -m benchmarks.saving

# YOLOV5: a checkout; PEER: the Python that its packages are installed for; ULTRALYTICS: one that ultralytics is installed
# for; PHOTOS: a folder with images/ and labels/; WEIGHTS: the official yolov5n.pt, for the validation
bench-versus: setup
	$(RUN) -m benchmarks.versus --data $(or $(PHOTOS),../datasets/coco128) $(if $(YOLOV5),--yolov5 $(YOLOV5)) \
		$(if $(PEER),--python $(PEER)) $(if $(ULTRALYTICS),--ultralytics $(ULTRALYTICS)) \
		$(if $(WEIGHTS),--weights $(WEIGHTS))

# Needs 8 GPUs and COCO; DATA: another data YAML; COUNTS: other numbers of GPUs, such as "1 2"
bench-gpus: setup
	$(RUN) -m benchmarks.gpus --data $(or $(DATA),data/coco.yaml) $(if $(COUNTS),--counts $(COUNTS))
