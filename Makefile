# Two commands matter: `make run` and `make test`. Both set up all that they need in .venv first.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
RESULTS ?= results

.PHONY: run test check lint types docs-check proto bench soak clean

run: $(READY)
	$(BIN)/kvstore demo

test: $(READY)
	$(BIN)/python -m pytest

check: lint types docs-check test

lint: $(READY)
	$(BIN)/ruff check kvstore tests
	$(BIN)/ruff format --check kvstore tests

types: $(READY)
	$(BIN)/mypy

docs-check: $(READY)
	$(BIN)/python tests/docs/check_docs.py

bench: $(READY)
	$(BIN)/kvstore bench bandwidth --output $(RESULTS)/bandwidth
	$(BIN)/kvstore bench index --output $(RESULTS)/index
	$(BIN)/kvstore replay --output $(RESULTS)/replay

proto: $(READY)
	$(BIN)/python -m grpc_tools.protoc -I kvstore/wire --python_out=kvstore/wire --pyi_out=kvstore/wire kvstore/wire/kvstore.proto

$(READY): pyproject.toml kvstore/native/streamcopy.c
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "kvstore needs Python 3.11 or newer: make PYTHON=/path/to/python3.11 $(MAKECMDGOALS)"; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); \
	  test "$$(id -u)" = 0 && command -v apt-get >/dev/null && apt-get update -q && apt-get install -qy python3-venv gcc libc6-dev && $(PYTHON) -m venv $(VENV); } \
	  || { echo "python3 -m venv does not work here: apt-get install python3-venv"; exit 1; }
	$(BIN)/python -m pip install -qq --upgrade pip
	$(BIN)/python -m pip install -qq -e '.[dev]'
	@touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info kvstore/native/*.so results
