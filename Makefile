# Everything needs only python3.11, pip and make; `.venv` is made on first use.
PYTHON ?= python3.11
BIN := .venv/bin
LOWEST := .venv-lowest

.PHONY: setup demo test test-fast test-slow test-compat torture lint docs clean

setup: .venv/ready

.venv/ready: pyproject.toml constraints.txt
	command -v $(PYTHON) >/dev/null || { echo "error: $(PYTHON) not found; set PYTHON=/path/to/python (3.11 or newer)"; exit 1; }
	@echo "setting up .venv: a minute or two, more if packages have to be downloaded"
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --disable-pip-version-check -q -c constraints.txt -e '.[test,lint]'
	touch $@

demo: setup
	$(BIN)/bastion demo

# Two processes of one thread each: small tensors gain nothing from more threads. A file is run by one of them, so that its
# fixtures are made once.
test: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

# For the working day: what everything depends on. A package is tested by its own folder: pytest tests/unit/attacks
FAST := -n 2 --dist loadfile --no-loadscope-reorder -m 'not slow and not processes' tests/unit/*.py tests/unit/measuring tests/golden

test-fast: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(FAST)

# With the lowest torch, torchvision and timm that are allowed; several GB, where torch comes with CUDA.
test-compat: $(LOWEST)/ready
	OMP_NUM_THREADS=1 $(LOWEST)/bin/python -m pytest $(FAST)

$(LOWEST)/ready: pyproject.toml constraints-lowest.txt
	test -x $(LOWEST)/bin/python || $(PYTHON) -m venv $(LOWEST)
	$(LOWEST)/bin/python -m pip install --disable-pip-version-check -q -c constraints-lowest.txt -e '.[test]'
	touch $@

test-slow: setup
	$(BIN)/python -m pytest -m slow

# Faults at random moments and at every file call, for this many minutes; the same command resumes.
# Then every kind of file of a run is damaged, input is mutated, and models hide their gradients. See docs/reliability.md.
MINUTES ?= 20
SEED ?= 0
torture: setup
	failed=0; \
	for part in "torture --seed $(SEED)" "torture.matrix --seed $(SEED)" "torture.fuzz --count 10000 --seed $(SEED)" torture.defences; do \
		OMP_NUM_THREADS=1 $(BIN)/python -m tests.$$part --minutes $(MINUTES) || failed=1; \
	done; exit $$failed

# The documentation as a site that needs no server and no network: site/index.html. A dead link is an error.
docs: .venv/docs-ready
	NO_MKDOCS_2_WARNING=1 OMP_NUM_THREADS=1 $(BIN)/python -m mkdocs build --strict

.venv/docs-ready: .venv/ready
	$(BIN)/python -m pip install --disable-pip-version-check -q -c constraints.txt -e '.[docs]'
	touch $@

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf .venv $(LOWEST) demo site
