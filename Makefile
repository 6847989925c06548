# make demo   set up .venv, install, run the main job          make check   ruff and mypy
# make test   set up .venv, install, check, run the tests      make bench   the benchmarks, results in benchmarks/results
# make proof  the slow proofs                                  make docs    the site, in build/site; then without a network
# make clean  remove .venv and what was built              make notebooks   run them anew, and keep their outputs

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
DOCS_READY := $(VENV)/.docs-ready
# A test that hangs says where, and fails.
HANGS := -o faulthandler_timeout=600 -o faulthandler_exit_on_timeout=true --max-worker-restart 0

.PHONY: demo test proof check docs bench notebooks clean
.DELETE_ON_ERROR:

$(READY): pyproject.toml setup.cfg constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	touch $@

$(DOCS_READY): $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[docs]"
	touch $@

demo: $(READY)
	$(BIN)/hydra-tune demo

test: check
	$(BIN)/python -m pytest -n 2 $(HANGS)

proof: $(READY)
	$(BIN)/python -m pytest -m proof -n 2 $(HANGS) -o faulthandler_timeout=3600

check: $(READY)
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .
	$(BIN)/python -m mypy

# Any warning fails it. The variable hides a notice that mkdocs-material prints about its own future.
docs: $(DOCS_READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --clean
	@echo "open build/site/index.html"

bench: $(READY)
	$(BIN)/python -m benchmarks.single_trial
	$(BIN)/python -m benchmarks.overhead
	$(BIN)/python -m benchmarks.simulation
	$(BIN)/python -m benchmarks.scheduler
	$(BIN)/python -m benchmarks.overlap
	$(BIN)/python -m benchmarks.prediction
	$(BIN)/python -m benchmarks.runner
	$(BIN)/python -m benchmarks.small_trials
	$(BIN)/python -m benchmarks.search
	$(BIN)/python -m benchmarks.interleaving
	$(BIN)/python -m benchmarks.ray_reports
	$(BIN)/python -m benchmarks.ray_tune
	$(BIN)/python -m benchmarks.ray_nodes
	$(BIN)/python -m benchmarks.shared_base
	$(BIN)/python -m benchmarks.view
	$(BIN)/python -m benchmarks.plan

# A cell that fails ends it.
notebooks: $(READY)
	$(BIN)/python .ci/run_notebooks.py

clean:
	rm -rf $(VENV) build dist *.egg-info
