# `make train` and `make test` are the whole set-up: the first call makes .venv and installs into it, later calls reuse it.
PYTHON ?= python3
VENV ?= .venv
ARGS ?=
SECONDS ?= 600
PYTEST_ARGS ?= -n auto --maxprocesses=4
PY := $(VENV)/bin/python
FUZZ := PYTHONPATH=tests $(PY) -m fuzz

# The CUDA version of the driver picks the CuPy wheels. `make GPU=cuda12 train` overrules it, `GPU=` goes without.
GPU := $(shell v=$$(nvidia-smi 2>/dev/null | sed -n 's/.*CUDA[A-Za-z ]*Version *: *\([0-9][0-9]*\).*/\1/p' | head -n 1); \
         if [ "$${v:-0}" -ge 13 ]; then echo cuda13; elif [ "$${v:-0}" -eq 12 ]; then echo cuda12; fi)
# Without a GPU the tests still load CuPy and its NVRTC; the wheels exist for Linux.
NVRTC := $(or $(GPU),$(if $(filter Linux,$(shell uname)),cuda12))

comma := ,
with = $(1)$(if $(2),$(comma)$(2))
EXTRAS_train := $(call with,train,$(GPU))
EXTRAS_bench := $(call with,bench,$(GPU))
EXTRAS_test := $(call with,test,$(NVRTC))
EXTRAS_check := $(call with,test$(comma)dev,$(NVRTC))
# What an installation serves besides itself.
SERVES_test := train bench
SERVES_check := train bench test

# The tests run in several processes; threads on top of them would only wait for each other.
test emulate fuzz sanitize check package: export OMP_NUM_THREADS := 1

.PHONY: help train doctor bench test emulate fuzz sanitize resources check package clean
.DELETE_ON_ERROR:

help: ## this list
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/make \1	\2/p' Makefile

train: $(VENV)/.for-train ## train a small network on handwritten digits; ARGS='--optimizer adamw' passes options
	$(PY) -m cafin_cupy train $(ARGS)

doctor: $(VENV)/.for-train ## say which backend will run here, and why
	$(PY) -m cafin_cupy doctor $(ARGS)

bench: $(VENV)/.for-bench ## measure against the other optimizers on this machine
	$(PY) -m bench $(ARGS)

test: $(VENV)/.for-test ## run the tests; where there is no GPU, those of the kernels run on an emulated one
	$(PY) -m pytest $(PYTEST_ARGS) $(ARGS)
	$(if $(ARGS),,$(MAKE) emulate)
	$(if $(ARGS),,$(FUZZ) --seed 1 --rounds 25)

emulate: $(VENV)/.for-test ## run the tests of the kernels on an emulated GPU; PyTorch's need a real one
	PYTHONPATH=tests $(PY) -m emulation $(PYTEST_ARGS) $(ARGS)

fuzz: $(VENV)/.for-test ## call the public functions at random; SECONDS=3600 looks longer, ARGS='--seed 1' chooses the calls
	$(FUZZ) --seconds $(SECONDS) $(ARGS)

sanitize: $(VENV)/.for-test ## run the tests of the kernels on a GPU under the tools of compute-sanitizer
	PYTHONPATH=tests $(PY) -m sanitize $(PYTEST_ARGS) $(ARGS)

resources: $(VENV)/.for-test ## write kernels/RESOURCES.md: registers and shared memory of every kernel on every architecture
	$(PY) tests/resources.py

check: $(VENV)/.for-check ## format, lint, types, tests, then the tests again on the built wheel
	$(PY) -m ruff format --check .
	$(PY) -m ruff check .
	$(PY) -m mypy cafin_cupy adapters bench
	$(PY) -m pytest $(PYTEST_ARGS)
	$(MAKE) emulate
	$(FUZZ) --seed 1 --rounds 25
	$(MAKE) package

# The sources are deleted from the unpacked sdist, so its tests can only find the installed wheel. The second
# environment sees the packages of the first through a .pth file; the wheel itself comes first on its path. NVIDIA's
# libraries are looked up beside the interpreter's own packages, hence the link.
package: $(VENV)/.for-check ## build the sdist, from it the wheel, and run the sdist's tests on the installed wheel
	rm -rf build dist
	$(PY) -m build --outdir dist .
	@set -e; tmp=$$(mktemp -d); trap 'rm -rf "$$tmp"' EXIT; \
	$(PY) -m venv "$$tmp/venv"; py="$$tmp/venv/bin/python"; \
	"$$py" -m pip install --quiet --no-deps dist/*.whl; \
	site='import sysconfig; print(sysconfig.get_path("purelib"))'; \
	theirs="$$($(PY) -c "$$site")"; ours="$$("$$py" -c "$$site")"; \
	echo "$$theirs" >"$$ours/borrowed.pth"; \
	if [ -d "$$theirs/nvidia" ]; then ln -s "$$theirs/nvidia" "$$ours/nvidia"; fi; \
	tar -xzf dist/*.tar.gz -C "$$tmp"; cd "$$tmp"/cafin_cupy-*; rm -rf cafin_cupy adapters kernels/*.cu*; \
	"$$py" -m pytest $(PYTEST_ARGS)

clean: ## remove what builds and tests leave behind (.venv stays)
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +

$(PY):
	@$(PYTHON) -c 'import sys; sys.exit("cafin_cupy needs Python 3.10 or later, this is %d.%d; name another: make PYTHON=python3.12 ..." % sys.version_info[:2] if sys.version_info < (3, 10) else 0)'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.for-%: setup.cfg pyproject.toml constraints.txt | $(PY)
	$(PY) -m pip install --constraint constraints.txt --editable '.[$(EXTRAS_$*)]'
	@touch $(patsubst %,$(VENV)/.for-%,$* $(SERVES_$*))
