# Two commands to begin with: `make quickstart` and `make test`.
PYTHON ?= python3
PYTHON_NEWEST ?= python3.12
MULTI30K ?= ../shared/data/multi30k
LIBREOFFICE ?= ../shared/data/libreoffice

PY := .venv/bin/python
RUN := .venv/bin/transformer-jax
INSTALLED := .venv/.installed
# Compilation uses one core; a file's tests share what they compile.
PARALLEL := --numprocesses auto --maxprocesses 8 --dist loadfile

NOTEBOOKS := $(wildcard notebooks/*.ipynb)
MATHJAX := mathjax@3.2.2

.PHONY: help quickstart test test-newest check shape fingerprint ci-long multi30k multi30k-fr multi30k-seeds multi30k-published ablations small-data libreoffice recipes attention attention-kinds layers windows remat devices faults scaling real-sizes million-lines gpu bench-decode readme pictures notebooks docs browser wheel clean

help:
	@echo "make quickstart        train on the built-in corpus (about 5 minutes) and translate"
	@echo "make test              the tests (at most 10 minutes)"
	@echo "make test-newest       the tests with the newest versions of all packages, on PYTHON_NEWEST"
	@echo "make check             ruff, pyright, import-linter"
	@echo "make ci-long           the notebooks, the site, the wheel, and runs from end to end"
	@echo "make shape             print the lines of code, and the calls from training to the scores and from translation to the top k"
	@echo "make fingerprint       print digests of trained parameters, to compare before and after a refactoring"
	@echo "make multi30k          train and evaluate on Multi30k (two to three hours), results/multi30k_en_de.json"
	@echo "make multi30k-fr       train and evaluate on Multi30k from English to French, results/multi30k_en_fr.json"
	@echo "make multi30k-seeds    train three seeds of the recipe and of the one before (6 hours)"
	@echo "make multi30k-published  train with the published settings (two and a half hours), results/multi30k_published.json"
	@echo "make small-data        train on few pairs, and with back-translation (5 hours), results/small_data.json"
	@echo "make ablations         change one part of the recipe at a time (10 hours), results/ablations.json"
	@echo "make libreoffice       train and evaluate on LibreOffice's help, results/libreoffice_en_de.json"
	@echo "make attention-kinds   train nine variants of attention on Multi30k (about 90 minutes)"
	@echo "make attention         measure the attention kernels and PyTorch's (about 20 minutes)"
	@echo "make recipes           train latent attention and its baselines (5 minutes), results/recipes.json"
	@echo "make layers            compare stacked and separate layers, results/layers.json"
	@echo "make docs              build the site, build/site, with the notebooks as pages"
	@echo "make notebooks         execute the notebooks, build/notebooks (about 10 minutes)"
	@echo "make wheel             build the package, dist, and test it in a clean environment"
	@echo "make pictures          draw the pictures of docs/attention.md"
	@echo "make windows           measure the cost of local attention, results/windows.json"
	@echo "make remat             measure policies of rematerialization, results/remat.json"
	@echo "make devices           compare a run on many meshes and processes (10 minutes), results/devices.json"
	@echo "make faults            kill, signal, fill and damage runs (40 minutes), results/faults.json"
	@echo "make scaling           compile for TPU slices ahead of time (three hours), results/scaling.json"
	@echo "make real-sizes        plan the recipes of IWSLT14 and WMT14, results/real_sizes.json"
	@echo "make gpu               test and measure on a GPU with PYTHON (at most 10 minutes), results/gpu.json"
	@echo "make bench-decode      compare decoding with CTranslate2 and Hugging Face (an hour, with training), results/decode.json"
	@echo "make million-lines     translate a million lines and measure the memory (15 minutes), results/million_lines.json"
	@echo "make readme            update tables and figures from results/ and the code"

# Runs only when a dependency has changed.
$(INSTALLED): pyproject.toml constraints.txt
	test -x $(PY) || $(PYTHON) -m venv .venv
	$(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

quickstart: $(INSTALLED)
	$(RUN) train --config=configs/quickstart.py --run=runs/quickstart
	$(RUN) evaluate --run=runs/quickstart --data grammar:test --show 10
	@echo
	@echo "Next: echo \"The old teacher buys a new book.\" | $(RUN) translate --run=runs/quickstart"
	@echo "      $(RUN) inspect --run=runs/quickstart      shows the config and the data of the run"
	@echo "      notebooks/03_train_and_translate.ipynb     the same in Python, with pictures"
	@echo "      configs/multi30k_en_de.py                  how to train on your own files"

test: $(INSTALLED)
	$(PY) -m pytest $(PARALLEL)

# Without constraints, and upgraded each time.
test-newest:
	test -x .venv-newest/bin/python || $(PYTHON_NEWEST) -m venv .venv-newest
	.venv-newest/bin/python -m pip install --quiet --disable-pip-version-check \
	  --upgrade --upgrade-strategy eager -e '.[dev]'
	.venv-newest/bin/python -m pytest $(PARALLEL)

check: $(INSTALLED)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	.venv/bin/lint-imports
	.venv/bin/pyright

ci-long: $(INSTALLED)
	$(MAKE) --jobs 3 browser wheel notebooks
	$(MAKE) docs
	$(PY) -m pytest -m long $(PARALLEL) --durations 20

multi30k: $(INSTALLED)
	$(RUN) train --config=configs/multi30k_en_de.py --run=runs/multi30k_en_de \
	  --config.data.train $(MULTI30K)/train.en.gz,$(MULTI30K)/train.de.gz \
	  --config.data.dev $(MULTI30K)/val.en.gz,$(MULTI30K)/val.de.gz
	$(PY) -m tools.multi30k --run runs/multi30k_en_de --data $(MULTI30K)
	$(MAKE) readme

multi30k-fr: $(INSTALLED)
	$(RUN) train --config=configs/multi30k_en_de.py --run=runs/multi30k_en_fr \
	  --config.data.train $(MULTI30K)/train.en.gz,$(MULTI30K)/train.fr.gz \
	  --config.data.dev $(MULTI30K)/val.en.gz,$(MULTI30K)/val.fr.gz
	$(PY) -m tools.multi30k --run runs/multi30k_en_fr --data $(MULTI30K) --language fr
	$(MAKE) readme

multi30k-seeds: $(INSTALLED)
	$(PY) -m tools.seeds --data $(MULTI30K)
	$(MAKE) readme

multi30k-published: $(INSTALLED)
	$(PY) -m tools.published --data $(MULTI30K)
	$(MAKE) readme

ablations: $(INSTALLED)
	$(PY) -m tools.ablations --data $(MULTI30K)
	$(MAKE) readme

small-data: $(INSTALLED)
	$(PY) -m tools.small_data --data $(MULTI30K)
	$(MAKE) readme

libreoffice: $(INSTALLED)
	$(RUN) train --config=configs/libreoffice_en_de.py --run=runs/libreoffice_en_de \
	  --config.data.train $(LIBREOFFICE)/train.en-de.tsv.gz \
	  --config.data.dev $(LIBREOFFICE)/dev.en-de.tsv.gz
	$(PY) -m tools.libreoffice --run runs/libreoffice_en_de --data $(LIBREOFFICE)
	$(MAKE) readme

# BEFORE: a checkout of another commit and a run that it reads, whose `translate` is timed, too.
bench-decode: $(INSTALLED)
	test -x .venv-peers/bin/python || $(PYTHON) -m venv .venv-peers
	.venv-peers/bin/python -m pip install --quiet --disable-pip-version-check torch==2.13.0
	.venv-peers/bin/python -m pip install --quiet --disable-pip-version-check \
	  ctranslate2 transformers sentencepiece
	$(PY) -m tools.bench_decode --run runs/multi30k_first --data $(MULTI30K) \
	  --peers .venv-peers/bin/python $(if $(BEFORE),--before $(BEFORE))
	$(MAKE) readme

million-lines: $(INSTALLED)
	test -e runs/quickstart/config.json || $(RUN) train --config=configs/quickstart.py --run=runs/quickstart
	$(PY) -m tools.million_lines --run runs/quickstart
	$(MAKE) readme

recipes: $(INSTALLED)
	$(PY) -m tools.recipes
	$(MAKE) readme

attention-kinds: $(INSTALLED)
	$(PY) -m tools.attention_kinds --data $(MULTI30K)
	$(MAKE) readme

attention: $(INSTALLED)
	$(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[peers]'
	$(RUN) bench attention --out results/attention
	$(MAKE) readme

layers: $(INSTALLED)
	$(PY) -m tools.layers
	$(MAKE) readme

windows: $(INSTALLED)
	$(PY) -m tools.windows
	$(MAKE) readme

remat: $(INSTALLED)
	$(PY) -m tools.remat
	$(MAKE) readme

devices: $(INSTALLED)
	XLA_FLAGS=--xla_force_host_platform_device_count=8 $(PY) -m tools.devices
	$(MAKE) readme

faults: $(INSTALLED)
	$(PY) -m tools.faults
	$(MAKE) readme

# In an environment of its own: with libtpu, JAX looks for a TPU whenever it starts.
scaling:
	test -x .venv-tpu/bin/python || $(PYTHON) -m venv .venv-tpu
	.venv-tpu/bin/python -m pip install --quiet --disable-pip-version-check \
	  -c constraints.txt -e '.[plot,tpu]'
	JAX_PLATFORMS=cpu .venv-tpu/bin/python -m tools.scaling
	$(MAKE) readme

real-sizes: $(INSTALLED)
	$(PY) -m tools.real_sizes
	$(MAKE) readme

# With the Python of a machine with a GPU, since .venv has no CUDA.
gpu:
	@$(PYTHON) -m tools.gpu

readme: $(INSTALLED)
	$(PY) -m tools.documents

pictures: $(INSTALLED)
	$(PY) -m tools.pictures
	$(MAKE) readme

notebooks: $(INSTALLED)
	$(PY) -m tools.notebooks $(NOTEBOOKS)

# Notebooks that have changed since they were executed.
build/notebooks/%.ipynb: notebooks/%.ipynb | $(INSTALLED)
	$(PY) -m tools.notebooks $<

build/mathjax/tex-svg.js:
	@command -v npm >/dev/null || { echo "make docs: needs npm, which fetches MathJax" >&2; exit 1; }
	mkdir -p $(@D)
	cd $(@D) && npm pack --silent $(MATHJAX)
	tar -xzmf $(@D)/mathjax-*.tgz -C $(@D) --strip-components=2 package/es5/tex-svg.js
	rm $(@D)/mathjax-*.tgz

docs: $(INSTALLED) build/mathjax/tex-svg.js $(NOTEBOOKS:%=build/%)
	$(PY) -m sphinx --fail-on-warning --keep-going --quiet --fresh-env --write-all -c docs . build/site
	$(PY) -m tools.site build/site

# Tests of the site need it, and are skipped with the reason where it is missing.
browser:
	@command -v chromedriver >/dev/null || test "$$(id -u)" != 0 || \
	  { apt-get -qq update && apt-get -qq install -y --no-install-recommends chromium chromium-driver; } \
	  >/dev/null || echo "chromium could not be installed: the tests in a browser are skipped"

wheel:
	rm -rf build/lib build/bdist.* build/wheel-venv dist
	$(PYTHON) -m venv build/wheel-venv
	build/wheel-venv/bin/pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir dist .
	build/wheel-venv/bin/pip install --quiet --disable-pip-version-check -c constraints.txt dist/*.whl
	build/wheel-venv/bin/python -I tools/wheel.py

shape: $(INSTALLED)
	$(PY) -m tools.shape

fingerprint: $(INSTALLED)
	$(PY) -m tools.fingerprint

clean:
	rm -rf .venv .venv-newest .venv-tpu build dist docs/reference runs
