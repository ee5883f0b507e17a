# Everything but gpu-check goes through .venv, which any target makes by itself.
PYTHON ?= python3
# An index of other builds of torch, such as those for CPUs: without one you get the CUDA build.
TORCH_INDEX ?=
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
CUDA := .venv-cuda/.made
CUDA_LOWEST := .venv-cuda-lowest/.made
# Files of tests that run at a time, in the order of tests/conftest.py: two would leave a
# quarter of two cores idle, as tests wait for processes.
WORKERS := 4
BY_FILE := -n $(WORKERS) --dist loadfile --no-loadscope-reorder
CUDA_TESTS := $(BY_FILE) tests/cuda
CLUSTER := tests/system/slurm
KERNEL_TESTS := tests/trainer/model/kernels
# Every process that runs tests imports their files: all of them would take 20 seconds.
SLOW_FILES = $(sort $(shell grep -rl --include='test_*.py' mark.slow tests --exclude-dir slurm))

DEMO := demo
DEMO_MODELS := bert-mini docs/assets/modernbert-tiny/config.json
DEMO_FUNCTIONS := 3000
DEMO_MEMORY := 256MiB
DEMO_MINUTES := 7
DEMO_STEPS := 30

GPU_TIME := 10min

# Tests start hundreds of processes, and each would compile the modules that it imports again.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help install demo test test-slow test-kernels test-cluster test-cuda soak check docs gpu-check bench figures clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/' | expand -t 20

install: $(STAMP) ## make .venv with the tested versions of everything

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "error: $(PYTHON) is older than 3.11; next: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 3; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt $(addprefix --extra-index-url ,$(TORCH_INDEX)) --editable '.[elf,parquet,slurm,tensorboard,wandb,bench,docs,dev]'
	@# Beside the environment: transformers imports it wherever it is installed, which takes half a second.
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-deps --target $(VENV)/fp8 torchao
	@# Beside it too: torch.compile would import it in every process of a CPU.
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-deps --target $(VENV)/triton triton
	@# Only its source is read: a test compares its functions with the calls of them.
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-deps --target $(VENV)/fa4 flash-attn-4
	@touch $(STAMP)

demo: $(STAMP) ## the whole chain on this machine's own programs: dataset, tuning, training, advice, report
	@BIN=$(BIN) DEMO=$(DEMO) MODELS="$(DEMO_MODELS)" FUNCTIONS=$(DEMO_FUNCTIONS) MEMORY=$(DEMO_MEMORY) MINUTES=$(DEMO_MINUTES) \
		STEPS=$(DEMO_STEPS) sh docs/demo.sh

test: $(STAMP) ## run the tests, with a sample of every fault loop
	$(BIN)/python -m pytest $(BY_FILE) -m 'not slow and not soak and not cuda and not interpreted' tests $(PYTEST_ARGS)

test-slow: $(STAMP) ## run the other tests: benchmarks in small, compiled code, a slow link
	$(BIN)/python -m pytest $(BY_FILE) -m slow $(SLOW_FILES) $(PYTEST_ARGS)

# A process interprets Triton's kernels only if it starts with this variable.
test-kernels: $(STAMP) ## run Triton's kernels on the CPU, in its interpreter
	TRITON_INTERPRET=1 PYTHONPATH=$(VENV)/triton $(BIN)/python -m pytest $(BY_FILE) -m interpreted $(KERNEL_TESTS) $(PYTEST_ARGS)

# Not beside other tests: jobs that measure are given minutes, and would need more of them.
test-cluster: $(STAMP) ## run jobs on a real SLURM cluster on this machine
	$(BIN)/python -m pytest -m slow $(CLUSTER) $(PYTEST_ARGS)

$(CUDA): $(STAMP) testbed/nullgpu/versions.toml testbed/nullgpu/environment.py
	$(BIN)/python -m testbed.nullgpu.environment newest
	@touch $@

$(CUDA_LOWEST): $(STAMP) testbed/nullgpu/versions.toml testbed/nullgpu/environment.py
	$(BIN)/python -m testbed.nullgpu.environment lowest
	@touch $@

test-cuda: $(CUDA) ## run torch's CUDA build on pretended GPUs, in an environment of its own (2 GB)
	NULLGPU_REQUIRED=1 $(BIN)/python -m pytest -m 'cuda and not soak' $(CUDA_TESTS) $(PYTEST_ARGS)

soak: $(STAMP) $(CUDA) $(CUDA_LOWEST) ## run every fault loop in full, properties with many examples, and keep the figures (about an hour on two cores)
	$(BIN)/python -m pytest -m 'soak and not cuda' tests $(PYTEST_ARGS)
	NULLGPU_REQUIRED=1 $(BIN)/python -m pytest $(CUDA_TESTS) $(PYTEST_ARGS)
	NULLGPU_REQUIRED=1 NULLGPU_TORCH=lowest $(BIN)/python -m pytest $(CUDA_TESTS) $(PYTEST_ARGS)
	$(BIN)/python -m pytest $(BY_FILE) --hypothesis-profile thorough -m 'not slow and not soak and not system and not interpreted' \
		tests/autotune tests/trainer $(PYTEST_ARGS)
	$(BIN)/python -m tests.system.faults --out reports/faults.json
	$(BIN)/python -m benchmarks.document

check: $(STAMP) ## lint, types, import contracts, documentation
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m benchmarks.words
	$(MAKE) --no-print-directory docs

docs: $(STAMP) ## the documentation as a site, in build/site; a warning is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

gpu-check: ## validate the claims on your GPU in ten minutes, in the environment you are in; GPU_TIME=60min: everything
	@# Not .venv, whose torch may be a CPU build. 1 says that something is missing or short:
	@# what there is, is kept all the same.
	$(PYTHON) -m benchmarks.gpu --out build/gpu-check --next $(GPU_TIME) --keep || [ $$? = 1 ]

bench: $(STAMP) ## run the benchmarks that have targets, and keep their figures
	@short=0; for name in cli feed scale prepare train estimate probe checkpoint workers network report advice paper_case tune promise own_code; do \
		$(BIN)/python -m benchmarks.$$name --json reports/benchmarks/$$name.json || short=1; \
	done; \
	$(BIN)/python -m benchmarks.document; exit $$short

figures: $(STAMP) ## update the figures and charts of README and docs from the committed files
	$(BIN)/python -m benchmarks.document

clean: ## remove all environments and the demo's files
	rm -rf $(VENV) .venv-cuda .venv-cuda-lowest .cuda $(DEMO)
