# On a fresh machine with Python 3.11 or newer: `make demo` runs the main job, `make test` all checks. Both set up first.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: demo test lint types unit wheel faults test-deploy test-deploy-matrix soak test-loops test-extras fuzz same-numbers fuzz-core fuzz-readers attacks audits mutants tables docs bench clean

demo: $(VENV)/.installed
	$(BIN)/fedtail demo

test: lint types unit wheel

lint: $(VENV)/.installed-test
	$(BIN)/ruff check src studies tests experiments docs benchmarks

types: $(VENV)/.installed-test
	$(BIN)/mypy

unit: $(VENV)/.installed-test $(VENV)/.browser
	$(BIN)/python -m pytest -n 2

# Runs that are killed at any moment, many times: too long for every test run.
faults: $(VENV)/.installed-test
	$(BIN)/python -m pytest -n 2 -m faults

# Deployments on this machine whose processes are killed, late and lie: about a quarter of an hour.
test-deploy: $(VENV)/.installed-test $(VENV)/.deploy-tools
	$(BIN)/python -m pytest -m deploy

# Every fault over every transport, networks that are cut among them (root, iproute2) and clocks that are wrong (faketime): an hour.
# Also the commands of docs/howto/deploy-server.md on a server and three nodes in namespaces (-k machines). What could not be tried is listed.
test-deploy-matrix: $(VENV)/.installed-test $(VENV)/.deploy-tools
	$(BIN)/python -m pytest -rs -m deploy_matrix

# Memory, descriptors and threads over 500 rounds of NVFlare and 20 of Flower, and 50 nodes on this machine: a quarter of an hour.
soak: $(VENV)/.installed-test
	$(BIN)/python benchmarks/deployment_soak.py nvflare
	$(BIN)/python benchmarks/deployment_soak.py flower
	$(BIN)/python benchmarks/deployment_soak.py many --nodes 50

# Losses in other people's training loops: torch.compile with a C++ compiler, Lightning, Hugging Face Trainer; a few minutes.
test-loops: $(VENV)/.installed-test
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[loops]'
	$(BIN)/python -m pytest -m "compiled or not compiled" tests/test_reducers.py
	$(BIN)/python -m pytest tests/test_documentation.py -k "examples_of_a_page and tilted"

# What other packages make of models and histories: MLflow and Weights & Biases offline, ONNX files that are run, bars of notebooks.
test-extras: $(VENV)/.installed-test
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[mlflow,wandb,onnx]' ipython sqlalchemy
	$(BIN)/python -m pytest -n 2 -rs tests/test_following.py tests/test_longer_runs.py tests/test_models_out.py

# Messages that nobody should send, against both sides of secure sums.
CASES ?= 1000000
fuzz: $(VENV)/.installed-test
	$(BIN)/python tests/fuzz_secure.py --cases $(CASES)

# Every method with these files and with an earlier commit: which runs end with other bits.
BASE ?= HEAD
same-numbers: $(VENV)/.installed-test
	$(BIN)/python tests/same_numbers.py --against $(BASE)

# Random methods, modules, kernels, channels and interruptions against a textbook of federated training, for an hour.
SECONDS ?= 3600
SEED ?= 0
fuzz-core: $(VENV)/.installed-test
	$(BIN)/python tests/fuzz_core.py --seconds $(SECONDS) --cases $(CASES) --seed $(SEED)

# Damaged and forged files and messages against everything that reads one, for an hour; each in a bound of memory and time.
fuzz-readers: $(VENV)/.installed-test
	PYTHONPATH=tests $(BIN)/python tests/fuzz_readers.py --seconds $(SECONDS) --seed $(SEED)

# Attacks on what the privacy statement and the threat model claim: each says what it tried and whether the claim held.
ATTACKS ?=
attacks: $(VENV)/.installed-test
	$(BIN)/python tests/attacks/run.py $(ATTACKS)

# Lower bounds on the epsilon of every private release, beside the claims and with noise that is too small: the table in docs/audits.md.
AUDITS ?=
audits: $(VENV)/.installed-test
	PYTHONPATH=tests $(BIN)/python -m audits --page docs/audits.md $(AUDITS)

# Defects put into a sample of the source, one at a time, each of which a test should notice: hours the first time, resumable.
PACKAGE ?=
SAMPLE ?= 60
JOBS ?= 2
mutants: $(VENV)/.installed-test
	PYTHONPATH=tests $(BIN)/python -m mutation run --sample $(SAMPLE) --seed $(SEED) --jobs $(JOBS) $(addprefix --area ,$(PACKAGE))

# What runs where, in docs/methods.md, as the parts declare it.
tables: $(VENV)/.installed-test
	$(BIN)/python -m fedtail.compatibility docs/methods.md

docs: $(VENV)/.installed-test
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "open site/index.html"

# The wheel, installed in a bare environment outside the clone, runs the main job.
wheel: $(VENV)/.installed-test
	PYTHON=$(BIN)/python sh tests/bare_wheel.sh

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e .
	touch $@

$(VENV)/.installed-test: $(VENV)/.installed studies/pyproject.toml
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test]' -e studies
	touch $@

# Seconds a round next to the naive loop and four peers, each in an environment of its own; hours on two cores.
bench: $(VENV)/.installed-test
	$(BIN)/python benchmarks/architectures.py
	$(BIN)/python benchmarks/scaling.py
	$(BIN)/python benchmarks/run.py

# The page is tested in a real browser: Debian's chromium, installed where it is missing and can be.
$(VENV)/.browser: $(VENV)/.installed-test
	@command -v chromium chromium-browser google-chrome >/dev/null 2>&1 \
	  || { apt-get install -y -qq chromium || { apt-get update -qq && apt-get install -y -qq chromium; }; } >/dev/null 2>&1 \
	  || echo "chromium is missing and could not be installed: the tests of the page will be skipped"
	touch $@

# Networks are cut by Debian's iproute2 and clocks are wrong by its faketime, installed where they are missing and can be.
$(VENV)/.deploy-tools: $(VENV)/.installed-test
	@{ command -v ip && ls /usr/lib/*/faketime/libfaketime.so.1; } >/dev/null 2>&1 \
	  || { apt-get install -y -qq iproute2 faketime || { apt-get update -qq && apt-get install -y -qq iproute2 faketime; }; } >/dev/null 2>&1 \
	  || echo "iproute2 and faketime are missing and could not be installed: tests of networks and clocks will be skipped"
	touch $@

clean:
	rm -rf $(VENV) site dist build .pytest_cache .mypy_cache .ruff_cache .hypothesis
