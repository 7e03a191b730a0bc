# make demo   see remat at work            make test   run the test suite
# Needs Python >= 3.10, pip and make; everything else goes into .venv.

PYTHON ?= python3
PIP_ARGS ?=
WORKERS ?= 2

STAMP := .venv/.installed
BIN := .venv/bin

.PHONY: demo test test-all families lint types docs browser clean

demo: $(STAMP)
	$(BIN)/remat demo

# One thread for each worker: more threads than cores wait for each other. A worker that has nothing left takes
# tests from another: some take minutes.
test test-all: export OMP_NUM_THREADS = 1

test: $(STAMP) browser
	$(BIN)/pytest -n $(WORKERS) --dist worksteal -m "not slow"

test-all: $(STAMP) browser
	$(BIN)/pytest -n $(WORKERS) --dist worksteal

# Fit every tiny model family and write docs/families.md: about half an hour. A broken-off sweep goes on.
families: $(STAMP)
	$(BIN)/python benchmarks/families.py --workers $(WORKERS) --out out/families.json --docs docs/families.md

# The site, in site/; a broken link or reference is an error.
docs: $(STAMP)
	$(BIN)/mkdocs build --strict

# The tests of the HTML report open it in Chromium.
browser:
	scripts/browser.sh

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check src tests

types: $(STAMP)
	$(BIN)/mypy

# Installed again whenever the requirements change; the pins live in constraints.txt. What is imported is compiled
# then: most of what is installed never is.
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --no-compile $(PIP_ARGS) -c constraints.txt -e '.[dev,docs,hf,diffusers,trl,lightning]'
	touch $@

clean:
	rm -rf .venv .mypy_cache .pytest_cache .ruff_cache .hypothesis dist build out
	find src tests -name __pycache__ -prune -exec rm -rf {} +
