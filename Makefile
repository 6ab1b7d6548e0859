# Each target is enough on a fresh machine with Python >= 3.10; all of them may be repeated.
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
LEAN := $(VENV)/.installed-for-training
FULL := $(VENV)/.installed
REQUIREMENTS := requirements.txt requirements-dev.txt requirements-deepspeed.txt requirements-export.txt \
	requirements-tune.txt requirements-mobile.txt requirements-track.txt

.PHONY: setup train test test-long test-gpu test-gpu2 test-floors \
	lint image numerics same-bytes constraints soak gpu gpu2 gpu-data readme bench-processes bench-versus

# Everything: for DeepSpeed, exports, tests and linters too.
setup: $(FULL)

define install
@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	{ echo "error: Python 3.10 or newer is needed; name one with make PYTHON=python3.11 $(MAKECMDGOALS)" >&2; exit 1; }
@test -x $(RUN) || $(PYTHON) -m venv $(VENV)
$(RUN) -m pip install --quiet --upgrade pip
$(RUN) -m pip install --quiet $(1)
endef

# The stamps are written last: an interrupted installation is done again. Everything includes what training needs.
$(LEAN): requirements.txt
	$(call install,-r requirements.txt)
	@touch $@

$(FULL): $(REQUIREMENTS)
	$(call install,-r requirements.txt -r requirements-dev.txt)
	$(RUN) -m pip install --quiet --no-deps -r requirements-mobile.txt -r requirements-track.txt
	@touch $(LEAN) $@

train: $(LEAN)
	$(RUN) train.py

# Two at a time, on one thread each; a file's tests one after another: they share what they have trained.
TWO_AT_A_TIME := OMP_NUM_THREADS=1 $(RUN) -m pytest -n 2 --dist loadfile --no-loadscope-reorder

test: setup
	$(TWO_AT_A_TIME) -m "not long and not gpu and not gpu2"

test-long: setup
	$(TWO_AT_A_TIME) -m "long and not gpu and not gpu2"

test-gpu: setup
	$(RUN) -m pytest -m gpu

test-gpu2: setup
	$(RUN) -m pytest -m gpu2

# Tests and measurements on a GPU, appended to docs/gpu.md; nothing is installed. PART: only these parts, such as "steps";
# GPU_PYTHON: another Python; GPU_FLAGS: more flags of benchmarks.gpu_report
GPU_PYTHON ?= $(if $(wildcard $(RUN)),$(RUN),$(PYTHON))

gpu:
	$(GPU_PYTHON) -m benchmarks.gpu_report $(if $(PART),--part $(PART)) $(GPU_FLAGS)

gpu2:
	$(GPU_PYTHON) -m benchmarks.gpu_report --pair $(if $(PART),--part $(PART)) $(GPU_FLAGS)

# What a machine without a network needs for it, in .gpu
gpu-data:
	$(GPU_PYTHON) -m benchmarks.gpu_data

# Faults on two simulated machines, one after another: needs root, and iproute2. SEED: other faults; SOAK_FLAGS: more flags
soak: setup
	$(RUN) -m benchmarks.chaos --rounds 50 --seed $(or $(SEED),0) $(SOAK_FLAGS)

# The lowest versions that the requirements allow, on the lowest Python of this machine, or FLOORS_PYTHON. CI does not run it.
FLOORS := .venv-floors
FLOORS_PYTHON ?= $(shell for minor in 10 11 12 13 14; do \
	for python in python3.$$minor $(HOME)/.pyenv/versions/3.$$minor.*/bin/python; do \
	$$python -c "" 2>/dev/null && echo $$python && exit; done; done)

# Without the linters: what those require would raise the versions.
$(FLOORS)/.installed: $(REQUIREMENTS)
	$(FLOORS_PYTHON) -m venv --clear $(FLOORS)
	$(FLOORS)/bin/python -m pip install --quiet uv
	$(FLOORS)/bin/uv pip install --quiet --python $(FLOORS)/bin/python --resolution lowest-direct \
		-r requirements.txt -r requirements-deepspeed.txt -r requirements-export.txt -r requirements-tune.txt \
		-c requirements-dev.txt pytest pytest-xdist hypothesis debugpy tensorboard mlflow-skinny wandb-workspaces \
		aiohttp
	@touch $@

# The tests of the packages; whole runs: the built-in job, shortened, and DeepSpeed's bf16 against fp32; five steps of each
# stage against DDP.
test-floors: $(FLOORS)/.installed
	$(FLOORS)/bin/python -m pytest -n 2 --dist loadfile -m "not long and not gpu and not gpu2" tests/data tests/models tests/utils
	$(FLOORS)/bin/python train.py --epochs 2
	$(FLOORS)/bin/python -m pytest tests/test_deepspeed.py -k "zero2_bf16 or five_steps"

image:
	@if docker info >/dev/null 2>&1; then docker build -t lockstep . && docker run --rm lockstep python train.py --help >/dev/null; \
	else echo "docker is not running: the Dockerfile is linted only (make lint)"; fi

# The newest versions, from an environment that has nothing else.
constraints:
	rm -rf .venv-newest
	$(MAKE) setup VENV=.venv-newest
	echo "# Written by make constraints: the versions that the tests of $(shell date +%F) ran with, for" > constraints.txt
	echo "# $$(.venv-newest/bin/python -V) on Linux. To install them: pip install -r requirements.txt -c constraints.txt" >> constraints.txt
	.venv-newest/bin/python -m pip freeze >> constraints.txt
	rm -rf .venv-newest

# .lines: the most lines that the source may have
SOURCE := '*.py' ':!tests' ':!benchmarks' ':!examples' ':!docs'

lint: setup
	@lines=$$(git ls-files -z $(SOURCE) | xargs -0 cat | wc -l); most=$$(cat .lines); test $$lines -le $$most || \
		{ echo "error: the source has $$lines lines, but .lines allows $$most; remove some, or raise it (CONTRIBUTING.md)" >&2; exit 1; }
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports --no-logo
	$(VENV)/bin/codespell
	@test ! -x $(VENV)/bin/hadolint || $(VENV)/bin/hadolint Dockerfile
	@! command -v actionlint >/dev/null || actionlint

# The built-in job, shortened to 20 steps, on 1 to 4 processes, and killed on one and resumed on two: compared step by
# step. EXPECT: the SHA-256 that the weights must have, see docs/exact.md
SAME := runs/same-bytes
STEPS := OMP_NUM_THREADS=1 $(RUN) train.py --epochs 2 --imgsz 64 --batch-size 64 --device cpu --workers 0 --noplots \
	--logical-processes 4 --hashes --save-steps 2 --project $(SAME) --name

same-bytes: $(LEAN)
	rm -rf $(SAME)
	for count in 1 2 3 4; do $(STEPS) $$count --processes $$count || exit 1; done
	@$(STEPS) killed & run=$$!; \
	while kill -0 $$run 2>/dev/null && [ "$$(cat $(SAME)/killed/hashes.csv 2>/dev/null | wc -l)" -lt 8 ]; do sleep 0.1; done; \
	kill -KILL $$run
	OMP_NUM_THREADS=1 $(RUN) train.py --resume $(SAME)/killed --processes 2
	for name in 2 3 4 killed; do \
		$(RUN) -m utils.compare_runs $(SAME)/1 $(SAME)/$$name $(if $(EXPECT),--expect $(EXPECT)) || exit 1; done

# Which tasks compute other numbers than the revision BASE, and from which step, for CHANGELOG.md
numerics: setup
	rm -rf .numerics && mkdir .numerics
	git archive $(BASE) | tar -x -C .numerics
	$(RUN) -m benchmarks.same_results --before .numerics

# The built-in job, and the picture, caption and row of the README from it
readme: $(LEAN)
	$(RUN) -m benchmarks.readme

bench-processes: setup
	$(RUN) -m benchmarks.processes

# YOLOV5: a checkout; PEER: the Python that its packages are installed for; ULTRALYTICS: one that ultralytics is installed
# for; PHOTOS: a folder with images/ and labels/
bench-versus: setup
	$(RUN) -m benchmarks.versus --data $(or $(PHOTOS),../datasets/coco128) $(if $(YOLOV5),--yolov5 $(YOLOV5)) \
		$(if $(PEER),--python $(PEER)) $(if $(ULTRALYTICS),--ultralytics $(ULTRALYTICS))
