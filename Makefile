# Everything a person does with this repository. `make demo` and `make test` need python3.11+ and pip, nothing else.
PYTHON ?= python3
BIN := .venv/bin
# Tiny nets on few cores: spinning OpenMP threads cost 5 to 12 times the time of the work itself.
export OMP_NUM_THREADS := 1
PYTEST := $(BIN)/pytest -n 2 --dist worksteal

.PHONY: demo test test-all check bench results docs clean chromium

demo: .venv/demo
	$(BIN)/python examples/demo.py

test: .venv/dev chromium
	$(PYTEST) -m "not slow"

test-all: .venv/peers chromium
	$(PYTEST)

# Tests of the page drive a browser. As root, where there is apt, it is one package; elsewhere they say why they skip.
chromium:
	@command -v chromium > /dev/null || \
	  { [ "$$(id -u)" = 0 ] && command -v apt-get > /dev/null && \
	    { apt-get update -qq; DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium; } \
	    > /dev/null 2>&1; } || echo "chromium is not installed: tests of the page in a browser are skipped"

check: .venv/dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: .venv/peers
	for name in offline ppo siblings telemetry value_start; do $(BIN)/python benchmarks/$$name.py || exit 1; done
	$(BIN)/esper bench

# The first row of the table of docs/results.md anew, from the shipped controller: about five minutes on two idle cores.
results: .venv/demo
	$(BIN)/python benchmarks/results.py measure mixed --arms none schedule heuristic small --learned small --workers 2
	$(BIN)/python benchmarks/results.py render

docs: .venv/docs
	$(BIN)/sphinx-build -q -W --keep-going docs build/docs
	@echo "The pages are in build/docs/index.html"

.venv/bin/python:
	$(PYTHON) -m venv .venv

.venv/demo: .venv/bin/python pyproject.toml constraints.txt
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[plot]"
	touch $@

.venv/dev: .venv/bin/python pyproject.toml constraints.txt
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	touch $@ .venv/demo

.venv/peers: .venv/dev
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[peers]"
	touch $@

.venv/docs: .venv/bin/python pyproject.toml constraints.txt
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[docs]"
	touch $@

clean:
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
