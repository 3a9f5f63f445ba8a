# Two commands to begin with: `make quickstart` and `make test`.
PYTHON ?= python3
PYTHON_NEWEST ?= python3.12
PYTHONS ?= python3.11 python3.12 python3.13
# With peers, the tests compare with PyTorch, Hugging Face's transformers and Firefox's engines, too.
EXTRAS ?= dev

PY := .venv/bin/python
RUN := .venv/bin/transformer-jax
INSTALLED := .venv/.installed
# Compilation uses one core; a file's tests share what they compile.
PARALLEL := --numprocesses auto --maxprocesses 8 --dist loadfile

NOTEBOOKS := $(wildcard notebooks/*.ipynb)
# From a clean kernel, in the folder of the notebook.
EXECUTE := .venv/bin/jupyter-execute --timeout=1200 --kernel_name=python3 --output='../build/notebooks/{notebook_name}'
MATHJAX := mathjax@3.2.2
MEASUREMENTS := attention costs decode devices faults interop million_lines minimum_risk model parts real_sizes remat \
  scaling train_speed windows

.PHONY: help quickstart test test-newest check ci-long test-slow shape multi30k study measure gpu readme pictures notebooks docs browser wheel release clean

help:
	@echo "Begin"
	@echo "  make quickstart         train on the built-in corpus (about 5 minutes) and translate"
	@echo "Check"
	@echo "  make test               the tests (at most 10 minutes)"
	@echo "  make test-newest        the tests with the newest versions of all packages, on PYTHON_NEWEST"
	@echo "  make check              ruff, pyright, import-linter"
	@echo "  make ci-long            the notebooks, the site, the wheel, and runs from end to end"
	@echo "  make test-slow          kills, trainings from end to end, the code of all pages (about 45 minutes)"
	@echo "  make shape              print the lines of code, and the calls from training to the scores and from translation to the top k"
	@echo "Study: train runs and score them, results/NAME.json. DATA=DIR names the folder of the corpora"
	@echo "  make multi30k           the recipe of Multi30k (two to three hours), NAME=multi30k_en_de"
	@echo "  make study NAME=...     multi30k_en_de, multi30k_en_fr, libreoffice_en_de: one run, or ONLY=\"RUN RUN\" of"
	@echo "                          multi30k_seeds (13 hours), multi30k_published (2.5 hours), ablations (10 hours),"
	@echo "                          distillation (3 hours after multi30k_seeds),"
	@echo "                          small_data (5 hours), attention_kinds (90 minutes), adaptation (1 hour),"
	@echo "                          recipes (5 minutes)"
	@echo "Measure"
	@echo "  make measure NAME=...   results/NAME.json: $(MEASUREMENTS)"
	@echo "  make gpu                test and measure on a GPU with PYTHON, results/gpu.json: what is missing there,"
	@echo "                          or PART=tests, attention, training, decoding, resume (up to 4 minutes each)"
	@echo "Documents"
	@echo "  make readme             update tables and figures from results/ and the code"
	@echo "  make pictures           draw the pictures of docs/attention.md"
	@echo "  make notebooks          execute the notebooks, build/notebooks (about 10 minutes)"
	@echo "  make docs               build the site, build/site, with the notebooks as pages"
	@echo "  make wheel              build the package, dist, and test it in a clean environment"
	@echo "  make clean              delete what the other commands build and install, but no run"
	@echo "  make release            the wheel and the sources, dist, tested with each of PYTHONS; uploads nothing"

# Runs only when a dependency has changed.
$(INSTALLED): pyproject.toml constraints.txt
	test -x $(PY) || $(PYTHON) -m venv .venv
	$(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[$(EXTRAS)]'
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
	rm -rf build/notebooks
	$(MAKE) --jobs 3 browser wheel $(NOTEBOOKS:%=build/%)
	$(MAKE) docs
	$(PY) -m pytest -m "long and not slow" $(PARALLEL) --dist worksteal --durations 20

test-slow: $(INSTALLED)
	$(PY) -m pytest -m slow $(PARALLEL) --dist worksteal --durations 20

multi30k:
	$(MAKE) study NAME=multi30k_en_de

study: $(INSTALLED)
	$(PY) -m tools.studies "$(NAME)" $(if $(DATA),--data $(DATA)) $(if $(ONLY),--only $(ONLY))
	$(MAKE) readme

# A measurement is a module, or a case of tools/measure.py; what needs more than that is below.
measure: $(INSTALLED)
	$(if $(filter $(MEASUREMENTS),$(NAME)),,$(error NAME=$(NAME): must be one of $(MEASUREMENTS)))
	$(or $(measure-$(NAME)),$(PY) -m $(if $(wildcard tools/$(NAME).py),tools.$(NAME),tools.measure $(NAME)))
	$(MAKE) readme

define measure-attention
$(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[peers]'
$(RUN) bench attention --out results/attention
endef

define measure-decode
test -x .venv-peers/bin/python || $(PYTHON) -m venv .venv-peers
.venv-peers/bin/python -m pip install --quiet --disable-pip-version-check torch==2.13.0
.venv-peers/bin/python -m pip install --quiet --disable-pip-version-check \
  ctranslate2 transformers sentencepiece
$(PY) -m tools.decode $(if $(DATA),--data $(DATA)) $(if $(TRAINED),--run $(TRAINED))
endef

define measure-model
$(if $(TRAINED),,$(error TRAINED= must name a run of configs/libreoffice_en_de.py))
$(PY) -m tools.model "$(TRAINED)"
endef

define measure-minimum_risk
$(if $(TRAINED),,$(error TRAINED= must name runs of configs/multi30k_en_de.py, such as "RUN RUN"))
$(PY) -m tools.minimum_risk $(TRAINED) $(if $(DATA),--data $(DATA))
endef

define measure-interop
$(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[peers]'
$(PY) -m tools.interop $(if $(DATA),--data $(DATA))
endef

# In an environment of its own: with libtpu, JAX looks for a TPU whenever it starts.
define measure-scaling
test -x .venv-tpu/bin/python || $(PYTHON) -m venv .venv-tpu
.venv-tpu/bin/python -m pip install --quiet --disable-pip-version-check \
  -c constraints.txt -e '.[plot,tpu]'
JAX_PLATFORMS=cpu .venv-tpu/bin/python -m tools.scaling
endef

# With the Python of a machine with a GPU, since .venv has no CUDA.
gpu:
	@$(PYTHON) -m tools.gpu $(PART)

readme: $(INSTALLED)
	$(PY) -m tools.documents

pictures: $(INSTALLED)
	$(PY) -m tools.pictures
	$(MAKE) readme

notebooks: $(INSTALLED)
	mkdir -p build/notebooks
	$(EXECUTE) $(NOTEBOOKS)

# Notebooks that have changed since they were executed.
build/notebooks/%.ipynb: notebooks/%.ipynb | $(INSTALLED)
	mkdir -p $(@D)
	$(EXECUTE) $<

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
	rm -rf build/lib build/bdist.* dist
	$(PYTHON) -m venv --clear build/wheel-venv
	build/wheel-venv/bin/pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir dist .
	$(call use-wheel,$(PYTHON),-c constraints.txt)

# Nothing is uploaded. Packages are what users of each Python get.
release:
	rm -rf build/lib build/bdist.* dist
	$(PYTHON) -m venv --clear build/release-venv
	build/release-venv/bin/pip install --quiet --disable-pip-version-check build twine
	build/release-venv/bin/python -m build --outdir dist .
	build/release-venv/bin/twine check --strict dist/*
	$(foreach python,$(PYTHONS),$(call use-wheel,$(python)))

define use-wheel
$(1) -m venv --clear build/wheel-venv
build/wheel-venv/bin/pip install --quiet --disable-pip-version-check $(2) dist/*.whl
build/wheel-venv/bin/python -I tools/wheel.py

endef

shape: $(INSTALLED)
	$(PY) -m tools.shape

clean:
	rm -rf .venv .venv-newest .venv-peers .venv-tpu build dist docs/reference
