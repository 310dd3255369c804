# Two commands matter: `make run` and `make test`. Both set up all that they need in .venv first.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
RUNS   := $(VENV)/.ready-to-run
SOURCES := pyproject.toml $(wildcard kvstore/native/*.c kvstore/native/quantize*.h)
# The links in kvstore/ to the folders beside it are not followed by every tool.
CODE    := kvstore bench compression engine_adapter prefix_index tiers tests examples
ENGINES := .venv-engines
RESULTS ?= results
# Byte code is kept, whatever the environment says: tests start hundreds of processes, which would compile it all again.
export PYTHONDONTWRITEBYTECODE :=
# Tests run in this many processes, "logical" for one a core; 0 runs them in one, with output as it comes.
JOBS    ?= logical
SPREAD  := -n $(JOBS) --maxprocesses 8 --dist worksteal

.PHONY: run test test-engines check lint types docs-check proto bench crash-long fuzz soak clean

# The demo needs a small part of what the tests need, and takes what is there already.
run: $(if $(wildcard $(READY)),$(READY),$(RUNS))
	$(BIN)/kvstore demo

test: $(READY)
	$(BIN)/python -m pytest $(SPREAD)

# With a real vLLM, in an environment of its own (4 GB): see docs/engines/vllm.md.
test-engines: $(ENGINES)/.ready
	OMP_NUM_THREADS=1 $(ENGINES)/bin/python -m pytest $(SPREAD) -c tests/engines/pytest.ini tests/engines

check: lint types docs-check test

lint: $(READY)
	$(BIN)/ruff check $(CODE)
	$(BIN)/ruff format --check $(CODE)

types: $(READY)
	$(BIN)/mypy

docs-check: $(READY)
	$(BIN)/python tests/docs/check_docs.py

bench: $(READY)
	$(BIN)/kvstore bench bandwidth --output $(RESULTS)/bandwidth
	$(BIN)/kvstore bench index --output $(RESULTS)/index
	$(BIN)/kvstore bench hybrid --output $(RESULTS)/hybrid
	$(BIN)/kvstore bench clients --output $(RESULTS)/clients
	$(BIN)/kvstore bench overlap --output $(RESULTS)/overlap
	$(BIN)/kvstore replay --output $(RESULTS)/replay

# Long runs. Every sync point of more workloads under more seeds; replays with a killed daemon under every write policy.
crash-long: $(READY)
	KVSTORE_CRASH_SEEDS=20 $(BIN)/python -m pytest tests/store/test_crash_points.py --timeout 0

fuzz: $(READY)
	KVSTORE_FUZZ_FRAMES=100000 $(BIN)/python -m pytest tests/server/test_wire_fuzz.py tests/server/grpc/test_grpc_fuzz.py --timeout 0

soak: $(READY)
	for policy in through back selective; do \
	  $(BIN)/kvstore replay --limit 5000 --clients 4 --dram-percent 5 --nvme-percent 25 --kill-at 0.5 \
	    --write-policy $$policy --output $(RESULTS)/soak-$$policy || exit 1; \
	done
	KVSTORE_CROWD=200 $(BIN)/python -m pytest tests/client/remote/test_remote.py -k many_clients

proto: $(READY)
	$(BIN)/python -m grpc_tools.protoc -I . --python_out=. --pyi_out=. kvstore/wire/kvstore.proto kvstore/wire/service.proto

$(READY): $(SOURCES)
	$(call install,dev)

# Touches nothing of the checkout, so it may run beside anything else.
$(ENGINES)/.vllm: tests/engines/install.py
	@test -x $(ENGINES)/bin/python || $(PYTHON) -m venv $(ENGINES)
	@echo "installing vLLM for the CPU into $(ENGINES) (the first time this takes minutes)"
	@$(ENGINES)/bin/python -m pip install -qq --upgrade pip packaging
	@$(ENGINES)/bin/python tests/engines/install.py
	@touch $@

$(ENGINES)/.ready: $(SOURCES) $(ENGINES)/.vllm
	@$(ENGINES)/bin/python -m pip install -qq --config-settings editable_mode=compat -e .
	@touch $@

$(RUNS): $(SOURCES)
	$(call install,bench)

# $(call install,EXTRA): a virtual environment with this checkout in it. The editable mode "compat" is a plain path, so
# that programs beside the checkout don't take its folder for the package.
define install
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "kvstore needs Python 3.11 or newer: make PYTHON=/path/to/python3.11 $(MAKECMDGOALS)"; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); \
	  test "$$(id -u)" = 0 && command -v apt-get >/dev/null && apt-get update -q && apt-get install -qy python3-venv gcc libc6-dev && $(PYTHON) -m venv $(VENV); } \
	  || { echo "python3 -m venv does not work here: apt-get install python3-venv"; exit 1; }
	@echo "installing kvstore[$(1)] and what it needs into $(VENV) (the first time this takes minutes)"
	@$(BIN)/python -m pip install -qq --upgrade pip
	@$(BIN)/python -m pip install -qq --config-settings editable_mode=compat -e '.[$(1)]'
	@touch $@
endef

clean:
	rm -rf $(VENV) $(ENGINES) build dist *.egg-info kvstore/native/*.so results
