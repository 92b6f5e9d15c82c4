# The README's two commands are `make demo` and `make test`; each sets up what it needs.
VENV   ?= .venv
PYTHON ?= python3.11
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

# Threads of CPU maths sleep at barriers: tests run beside servers and workers on few cores (see gewell/threads.py).
export OMP_WAIT_POLICY ?= PASSIVE

.PHONY: setup demo eval test check format test-gpu test-clients chaos bench clean

setup: $(STAMP)

$(STAMP): pyproject.toml requirements.lock
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	touch $@

check: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

test: $(STAMP)
	$(BIN)/python -m pytest -q -m "not gpu"

test-gpu: $(STAMP)
	$(BIN)/python -m pytest -q -m gpu

# Clients that nobody here wrote, in an environment of their own, against the gateway.
test-clients: $(STAMP)
	test -x .venv-clients/bin/python || $(PYTHON) -m venv .venv-clients
	.venv-clients/bin/python -m pip install --quiet openai==3.57.0 litellm==1.110.2 langchain-openai==1.7.4 pytest
	GEWELL_BIN=$(abspath $(BIN)/gewell) .venv-clients/bin/python -m pytest -q -p no:cacheprovider -c /dev/null --rootdir . tests/clients

CHAOS ?= --jobs 20000 --faults 1000
chaos: $(STAMP)
	$(BIN)/python tests/workers/chaos.py $(CHAOS) --persistence everysec
	$(BIN)/python tests/workers/chaos.py $(CHAOS) --persistence always

demo: $(STAMP)
	$(BIN)/gewell demo

eval: $(STAMP)
	$(BIN)/gewell eval tasks gewell-nano -n 40
	$(BIN)/gewell eval niah gewell-nano -n 2

bench: $(STAMP)
	$(BIN)/gewell bench cpu
	$(BIN)/gewell bench queue

clean:
	rm -rf $(VENV) build dist *.egg-info
