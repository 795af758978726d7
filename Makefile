# Everything runs in .venv, made on first use with any Python 3.11 or newer and nothing else.
PYTHON ?= python3
MODEL ?=
DATA ?=
SUITE ?= suites/pg19.yaml
ARGS ?=
BIN = .venv/bin

.PHONY: bench test check microbench clean

bench: .venv/ready  ## the main job: make bench MODEL=dir-or-hub-id DATA=dir [ARGS="--set tokens=20000"]
	$(BIN)/bench run $(SUITE) $(if $(MODEL),--model '$(MODEL)') $(if $(DATA),--data '$(DATA)') $(ARGS)
	$(BIN)/bench leaderboard
	@echo "The leaderboard is in leaderboard/README.md"

test: .venv/ready  ## all tests
	$(BIN)/python -m pytest -n auto

check: .venv/ready  ## what CI checks: lint, format, types, tests
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(MAKE) test

microbench: .venv/ready  ## decode speed beside a plain Hugging Face loop: make microbench MODEL=dir
	$(BIN)/python tests/benchmarks/decode_speed.py $(MODEL)

.venv/ready: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed" if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

clean:
	rm -rf .venv
