CONFIG ?= experiments/quickstart.yaml
ARGS ?=

.PHONY: run test check setup clean

run: setup  ## train CONFIG (dotted overrides in ARGS)
	@.venv/bin/nereus train $(CONFIG) $(ARGS)

test: setup  ## all tests; ARGS are pytest's
	@OMP_NUM_THREADS=1 .venv/bin/python -m pytest $(ARGS)

check: setup  ## ruff, pyright, import rule
	@bash scripts/check

setup:  ## .venv with everything pinned; PYTHON=... chooses the interpreter
	@PYTHON="$(PYTHON)" bash scripts/setup

clean:  ## what set-up, tests and checks made; keeps runs/
	rm -rf .venv build nereus.egg-info .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find nereus tests experiments scripts -name __pycache__ -prune -exec rm -rf {} + 2>/dev/null || true
