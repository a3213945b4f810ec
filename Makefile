# The project's commands. Only python3 (3.11+, with venv), java (17+), a C compiler and make are needed;
# all else is fetched into .venv (from the locked requirements) and into the user's cache (the jars).

PYTHON ?= python3
VENV := .venv
# An interpreter that is named and is not that of .venv has an environment of its own, such as .venv-3.12.
ifeq ($(origin PYTHON),command line)
VERSION := $(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)
ifneq ($(and $(VERSION),$(wildcard .venv/lib)),)
ifeq ($(wildcard .venv/lib/python$(VERSION)),)
VENV := .venv-$(VERSION)
endif
endif
endif
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
# What `make run` needs is a part of that.
RUNNABLE := $(or $(wildcard $(INSTALLED)),$(VENV)/.runnable)
UV := $(BIN)/uv
NATIVE := setup.py $(shell find gateway mapping protocols -name '*native*.[ch]')

export PIP_DISABLE_PIP_VERSION_CHECK := 1

# After a build that has failed: say so when there is nothing to build with.
SAY_COMPILER = command -v cc >/dev/null \
	&& $(BIN)/python -c 'import pathlib, sysconfig as s; pathlib.Path(s.get_path("include"), "Python.h").stat()' 2>/dev/null \
	|| echo "python-qpid-proton and Trivium's extensions are built from source: install a C compiler and Python's headers (Debian, Ubuntu: apt-get install gcc python3-dev)" >&2

.DEFAULT_GOAL := help
.PHONY: help setup check-python check-java jars pythons run cluster test test-core test-cluster coverage sanitize fuzz clients wheel-check site sbom workflows spec lint format clauses picture screens tables lock clean

help:  ## Show the commands
	@sed -n 's/^\([a-z-]*\):.*  ## \(.*\)/make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 16

setup: check-java $(INSTALLED) jars  ## Install everything; quick when nothing is to do
	@$(BIN)/python -m tools.class_recording

check-python:
	@$(PYTHON) -c '' 2>/dev/null \
		|| { echo "$(PYTHON) is missing or does not run: install Python 3.11 or newer (with venv), or name one that \"make pythons\" finds" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "$(PYTHON) is too old: install Python 3.11 or newer, or name one: make PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null \
		|| { echo "$(PYTHON) has no venv: install it (Debian, Ubuntu: apt-get install python3-venv)" >&2; exit 1; }

check-java: check-python
	@$(PYTHON) -I gateway/embedded/java.py

$(UV): requirements/bootstrap.txt | check-java
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --require-hashes -r requirements/bootstrap.txt
	@touch $@

# Apart, so that the jars, which a part of pyspark fetches, come beside the other packages.
FETCHER := $(VENV)/.fetcher
$(FETCHER): requirements/jars.txt $(UV)
	@VIRTUAL_ENV=$(VENV) $(UV) pip install --quiet --require-hashes --build-constraints requirements/run.txt -r $<
	@touch $@

jars: $(FETCHER)
	@$(BIN)/python -m tools.fetch_jars

define install
	@VIRTUAL_ENV=$(VENV) $(UV) pip sync --require-hashes --build-constraints $(1) $(1) || { $(SAY_COMPILER); exit 1; }
	@VIRTUAL_ENV=$(VENV) $(UV) pip install --quiet --offline --no-deps --no-build-isolation --editable . \
		|| { $(SAY_COMPILER); exit 1; }
	@touch $@
endef

$(INSTALLED): requirements/dev.txt pyproject.toml $(NATIVE) $(FETCHER)
	$(call install,requirements/dev.txt)

$(VENV)/.runnable: requirements/run.txt pyproject.toml $(NATIVE) $(FETCHER)
	$(call install,requirements/run.txt)

pythons:  ## Show the supported interpreters of this machine, for make test PYTHON=..., and those that are absent
	@python3 tools/interpreters.py

run: check-java  ## Run Kafka, the gateway, the Spark job and demo clients; DURATION=30 ends by itself
	@$(MAKE) --no-print-directory --jobs=2 $(RUNNABLE) jars
	@$(BIN)/python -m loadtest.demo $(if $(DURATION),--duration $(DURATION)) $(if $(TRIGGER),--trigger $(TRIGGER))

cluster: setup  ## Run three Kafka brokers as one cluster until Ctrl-C; their data in .trivium/cluster
	@$(BIN)/python -m tools.cluster $(ARGS)

# Nearly half of the time of the tests is waiting: four workers keep two cores busy.
WORKERS ?= 4

test: setup lint  ## Run all checks and all tests; ARGS="-k name" for some
	$(BIN)/python -m pytest -n $(WORKERS) $(ARGS)

test-core: setup  ## Run the tests of the core with the optional parts hidden
	$(BIN)/python -m pytest -n $(WORKERS) -p tests.support.without_parts tests/flowcontrol tests/mapping tests/protocols \
		tests/conformance tests/gateway $(ARGS)

# Not with -n: three brokers are enough.
test-cluster: setup  ## Run the tests that need three brokers, which "make test" leaves out
	$(BIN)/python -m pytest -m cluster tests/cluster $(ARGS)

coverage: setup  ## Run the tests of the layers without I/O, and fail below the floor in pyproject.toml
	$(BIN)/python -m pytest -n 2 --cov --cov-report=term:skip-covered tests/flowcontrol tests/mapping tests/protocols

clients: check-java $(INSTALLED)  ## Fetch and build the foreign clients of the tests (needs node, npm, a JDK, Go and Cargo)
	@$(BIN)/python -m tests.interop.fetch

spec: setup  ## Check the models in docs/spec with TLC, and that it finds their mutations (minutes)
	@$(BIN)/python -m tests.spec.model_checker

wheel-check: $(INSTALLED)  ## Build the wheel for each Python found, install and run it outside of the clone (minutes)
	@$(BIN)/python -m tools.wheel_check $(ARGS)

ONCE = $(UV) run --quiet --isolated --no-project

site: $(INSTALLED)  ## Build the site of docs/ in .trivium/site; a broken link fails
	@$(ONCE) --with-requirements requirements/site.txt mkdocs build --strict

sbom: $(INSTALLED)  ## Write dist/sbom.json: what the gateway is made of, in CycloneDX
	@mkdir -p dist
	@$(ONCE) --with-requirements requirements/release.txt \
		cyclonedx-py requirements --pyproject pyproject.toml --output-file dist/sbom.json requirements/gateway.txt

ACTIONLINT := v1.7.12

workflows:  ## Check the workflows in .github with actionlint (needs Go)
	go run github.com/rhysd/actionlint/cmd/actionlint@$(ACTIONLINT)

# What they find ends the tests; leaks are those of Python itself, and counted in the tests. ARGS are pytest's.
SANITIZED := .trivium/sanitized
SANITIZE := -Werror -O1 -g -UNDEBUG -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize-recover=all

sanitize: $(INSTALLED)  ## Run the tests of the C extensions under the sanitizers of addresses and of undefined behaviour
	rm -rf $(SANITIZED)
	CFLAGS="$(SANITIZE)" $(BIN)/python setup.py --quiet build --build-base $(SANITIZED) --build-lib $(SANITIZED)/lib
	LD_PRELOAD=$$(cc -print-file-name=libasan.so) ASAN_OPTIONS=detect_leaks=0 PYTHONMALLOC=malloc \
		$(BIN)/pytest -q -o pythonpath="$(SANITIZED)/lib ." $(ARGS) $$(find tests -name test_native.py)

fuzz: ARGS = --hypothesis-profile=fuzz -k "any or reference or damaged or mistake" --timeout=0
fuzz: sanitize  ## The same with 3,000 random inputs for each test of a function in C

lint: $(INSTALLED)  ## Run ruff, mypy and import-linter
	$(BIN)/ruff check
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(INSTALLED)  ## Format the code
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

clauses: $(INSTALLED)  ## Write docs/conformance-mqtt.md from the marks in the tests
	$(BIN)/python -m tools.clauses

picture: $(INSTALLED)  ## Draw docs/architecture.svg from docs/architecture.toml
	$(BIN)/python -m tools.picture

screens: $(INSTALLED)  ## Take the pictures of README from a run of the demo (needs Chromium)
	$(BIN)/python -m tools.screens

tables: $(INSTALLED)  ## Write the tables of docs, the dashboards and alerts of deploy, and docs/adr/README.md
	$(BIN)/python -m tools.tables
	$(BIN)/python -m tools.dashboards
	$(BIN)/python -m tools.strimzi

COMPILE = $(UV) pip compile --quiet --universal --generate-hashes --python-version 3.11 \
	--custom-compile-command "make lock" $(if $(UPGRADE),--upgrade)

lock:  ## Write all lock files anew (versions stay where they fit; UPGRADE=1 takes the newest)
	@test -x $(UV) || { echo "make lock needs uv: run make setup first" >&2; exit 1; }
	$(COMPILE) requirements/bootstrap.in --output-file requirements/bootstrap.txt
	$(COMPILE) pyproject.toml --all-extras --group dev --output-file requirements/dev.txt
	$(COMPILE) pyproject.toml --constraint requirements/dev.txt --output-file requirements/gateway.txt
	$(COMPILE) pyproject.toml --extra loadtest --group run --constraint requirements/dev.txt --output-file requirements/run.txt
	$(COMPILE) --group jars --constraint requirements/dev.txt --output-file requirements/jars.txt
	$(COMPILE) --group release --output-file requirements/release.txt
	$(COMPILE) --group site --output-file requirements/site.txt
	$(BIN)/python -m tools.lock_jars
	cd tests/interop/mqtt/node && npm install --package-lock-only
	cd tests/interop/amqp/node && npm install --package-lock-only
	cd tests/interop/amqp/go && go mod tidy
	cd tests/interop/deploy/helm && go mod tidy -e 2>/dev/null
	$(BIN)/python -m tests.interop.fetch lock

clean:  ## Remove what the commands made here; the cache of jars stays
	rm -rf .venv* .coverage .trivium build dist trivium.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	rm -rf tests/interop/*/node/node_modules tests/interop/*/*/build
	find . -name __pycache__ -prune -exec rm -rf {} +
	find gateway mapping protocols -name '_native.*.so' -delete
