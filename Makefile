# Thin: each target prepares the environment once, then calls `dflash-offline`.
# RUN=my-run.toml picks the run file (default: the embedded demo); SET="a.b=1 c.d=2" overrides settings.

RUN ?= demo
SET ?=
PYTHON ?= python3
VENV ?= .venv

BIN := $(VENV)/bin
CLI := $(BIN)/dflash-offline
OVERRIDES := $(foreach setting,$(SET),--set $(setting))
# A machine with a GPU keeps the torch that is installed there; others get the pinned version, as the
# CPU build where the package index in use has one.
HAS_CUDA_TORCH := $(shell $(PYTHON) -c "import torch; print(int(torch.cuda.is_available()))" 2>/dev/null)

.PHONY: setup extract train eval export demo test check format slow clean help
help:
	@echo "make extract train   run both stages (RUN=$(RUN))"
	@echo "make eval export     measure and export the drafters"
	@echo "make test check      run the tests, the static checks"

setup: $(VENV)/.installed
$(VENV)/.installed: pyproject.toml constraints.txt
ifeq ($(HAS_CUDA_TORCH),1)
	$(PYTHON) -m venv --system-site-packages $(VENV)
	grep -vE '^(torch|triton|transformers|numpy)==' constraints.txt > $(VENV)/constraints.txt
else
	$(PYTHON) -m venv $(VENV)
	cp constraints.txt $(VENV)/constraints.txt
endif
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c $(VENV)/constraints.txt -e .
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c $(VENV)/constraints.txt -e '.[dev]'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps dflash==0.1.0
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target $(VENV)/peers speculators==0.9.0
	touch $@

$(VENV)/.installed-slow: $(VENV)/.installed-dev
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c $(VENV)/constraints.txt -e '.[services]'
	touch $@

extract: setup
	$(CLI) extract $(RUN) $(OVERRIDES)

train: setup
	$(CLI) train $(RUN) $(OVERRIDES)
	$(CLI) eval $(RUN) $(OVERRIDES)
	$(CLI) export $(RUN) $(OVERRIDES)

eval export: setup
	$(CLI) $@ $(RUN) $(OVERRIDES)

demo: extract train

test: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -q -n 2

slow: $(VENV)/.installed-slow
	$(BIN)/python -m pytest -q -m slow -rs -n 2 --dist loadfile

check: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/codespell

format: $(VENV)/.installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build dist *.egg-info
