# make demo   train a small model end to end: SFT, then DPO (3 minutes on 2 cores, after installation)
# make test   lint and tests, 4 minutes on 2 quiet cores; make test-all runs the large matrices whole
# make test-all  all tests, also those marked slow; before a release
# make doctor what this machine has, what to train with, what is wrong
# make gpu-check the acceptance run on a GPU (tests/gpu), at most 30 minutes; without a GPU, what makes sense on a CPU, small
# make docs   build the site in site/
# make lock   write requirements.lock again, after the requirements in pyproject.toml changed
# make golden the comparison with the published reference only, on every mesh

PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
IN_PARALLEL := -n auto --dist worksteal  # tests/conftest.py says how many
unexport PYTHONDONTWRITEBYTECODE  # each process would compile the tests anew

.PHONY: demo docs test tests test-all lint doctor golden gpu-check format lock clean-demo

demo: $(VENV)/.installed
	$(VENV)/bin/dpo demo

# together: the check of types alone would leave all cores but one idle
test: $(VENV)/.installed-dev
	$(MAKE) -j2 lint tests

tests:
	$(RUN) -m pytest -q $(IN_PARALLEL) --durations=30

test-all: $(VENV)/.installed-all lint
	$(RUN) -m pytest -q $(IN_PARALLEL) -m ""

lint: $(VENV)/.installed-dev
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/basedpyright --pythonpath $(RUN)
	$(RUN) -m pytest -q tests/test_structure.py -k style

doctor: $(VENV)/.installed
	$(VENV)/bin/dpo doctor

gpu-check: $(VENV)/.installed-dev
	$(RUN) -m scripts.gpu_check

docs: $(VENV)/.installed-all
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --quiet

golden: $(VENV)/.installed-dev
	$(RUN) -m pytest -q tests/runs/test_golden.py -m "" $(IN_PARALLEL)

format: $(VENV)/.installed-dev
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

# what a fresh environment gets, without the suffix of torch's build (+cpu, +cu130)
lock:
	$(PYTHON) -m venv --clear .cache/lock
	.cache/lock/bin/python -m pip install --quiet --disable-pip-version-check -e '.[dev,eval,docs]' torch==2.13.0
	{ echo "# every version the tests ran with, transitive ones too; made by: make lock"; \
	  .cache/lock/bin/python -m pip freeze --all --exclude-editable --exclude pip | sed 's/+.*//'; } > requirements.lock
	rm -r .cache/lock

clean-demo:
	rm -rf .cache/demo

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and f"Python 3.11 or newer is needed, this is {sys.version.split()[0]}: make PYTHON=/path/to/python3.11")'
	$(PYTHON) -m venv $(VENV)

INSTALL := $(RUN) -m pip install --quiet --disable-pip-version-check -c requirements.lock

$(VENV)/.installed: pyproject.toml requirements.txt requirements.lock | $(VENV)/bin/python
	$(INSTALL) -r requirements.txt -e .
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(INSTALL) -e '.[dev]'
	touch $@

$(VENV)/.installed-all: $(VENV)/.installed-dev
	$(INSTALL) -e '.[dev,eval,docs]'
	touch $@
