# Two commands to begin with: `make quickstart` and `make test`.
PYTHON ?= python3
MULTI30K ?= ../shared/data/multi30k

PY := .venv/bin/python
RUN := .venv/bin/transformer-jax
INSTALLED := .venv/.installed

.PHONY: help quickstart test check ci-long multi30k recipes attention attention-kinds layers windows readme docs clean

help:
	@echo "make quickstart        train on the built-in corpus (about 5 minutes) and translate"
	@echo "make test              the tests (at most 10 minutes)"
	@echo "make check             ruff, pyright, import-linter"
	@echo "make ci-long           the notebook and a short run from end to end"
	@echo "make multi30k          train on Multi30k (about an hour) and write results/multi30k_en_de.json"
	@echo "make attention-kinds   train nine kinds of attention on Multi30k (about 90 minutes)"
	@echo "make attention         measure the kernels of attention, PyTorch's beside (about 20 minutes)"
	@echo "make recipes           train latent attention and its baselines (5 minutes), results/recipes.json"
	@echo "make layers            measure stacked against separate layers, results/layers.json"
	@echo "make docs              draw the pictures of docs/attention.md"
	@echo "make windows           measure what windows of attention cost, results/windows.json"
	@echo "make readme            bring tables and figures up to date with results/ and the code"

# Made anew only when what it is made from changes.
$(INSTALLED): pyproject.toml constraints.txt
	test -x $(PY) || $(PYTHON) -m venv .venv
	$(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

quickstart: $(INSTALLED)
	$(RUN) train --config=configs/quickstart.py --run=runs/quickstart
	$(RUN) evaluate --run=runs/quickstart --data grammar:test --show 10
	@echo
	@echo "Next: echo \"The old teacher buys a new book.\" | $(RUN) translate --run=runs/quickstart"
	@echo "      $(RUN) inspect --run=runs/quickstart      what was trained, and on what"
	@echo "      notebooks/quickstart.ipynb                 the same from Python, with a map of attention"
	@echo "      configs/multi30k_en_de.py                  your own files: see --config.data.train there"

test: $(INSTALLED)
	$(PY) -m pytest

check: $(INSTALLED)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	.venv/bin/lint-imports
	.venv/bin/pyright

ci-long: $(INSTALLED)
	$(PY) -m pytest -m long
	$(PY) -m pytest --nbmake --nbmake-timeout=1200 -m "" -W default notebooks

multi30k: $(INSTALLED)
	$(RUN) train --config=configs/multi30k_en_de.py --run=runs/multi30k_en_de \
	  --config.data.train $(MULTI30K)/train.en.gz,$(MULTI30K)/train.de.gz \
	  --config.data.dev $(MULTI30K)/val.en.gz,$(MULTI30K)/val.de.gz
	$(PY) -m transformer_jax.benchmark.multi30k --run runs/multi30k_en_de --data $(MULTI30K)
	$(MAKE) readme

recipes: $(INSTALLED)
	$(PY) -m transformer_jax.benchmark.recipes
	$(MAKE) readme

attention-kinds: $(INSTALLED)
	$(PY) -m transformer_jax.benchmark.attention_kinds --data $(MULTI30K)
	$(MAKE) readme

attention: $(INSTALLED)
	$(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[peers]'
	$(RUN) bench attention --out results/attention
	$(MAKE) readme

layers: $(INSTALLED)
	$(PY) -m transformer_jax.benchmark.layers
	$(MAKE) readme

windows: $(INSTALLED)
	$(PY) -m transformer_jax.benchmark.windows
	$(MAKE) readme

readme: $(INSTALLED)
	$(PY) -m transformer_jax.benchmark.readme

docs: $(INSTALLED)
	$(PY) -m transformer_jax.benchmark.pictures
	$(MAKE) readme

clean:
	rm -rf .venv runs
