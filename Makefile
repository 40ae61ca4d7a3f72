# Every target sets up what it needs in .venv. `make help` lists them.
PYTHON ?= python3.11
VENV ?= .venv
BIN := $(VENV)/bin
VLLM_VENV ?= .venv-vllm
STAMP := $(VENV)/.installed
# Workers of pytest: tests wait for other processes half of the time. Those of `test-long` measure them, too.
JOBS ?= 4
LONG_JOBS ?= 2
# Parallel tests share the cores: one thread each, and no spinning. Compiled files are kept, since each test that starts
# processes would compile the package anew.
QUIET := OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive PYTHONDONTWRITEBYTECODE=
# Whether CI, which began at CI_SINCE, has taken less than so many seconds; else it says what it leaves out.
IN_TIME = { [ $$(( $$(date +%s) - $${CI_SINCE:-$$(date +%s)} )) -lt $(1) ] || { echo "SKIPPED: $(2): CI is slow here"; false; }; }
# Properties of searches, indexes, heaps and books, where more examples find more: no tensors, no processes.
SEARCHED := $(addprefix tests/,core kv latency scheduling placement controller transfer workload metrics accelerator)

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-long vllm nixl ray test-vllm check format bench clients docs figures lock audit sbom package embedded clean

help: ## show this list
	@awk -F':.*## ' '/^[a-z-]+:.*## /{printf "  make %-11s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(STAMP): pyproject.toml requirements/dev.lock
	@test -d $(VENV) || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c requirements/dev.lock -e '.[serve,plot,dev,manifests]'
	@touch $(STAMP)

setup: $(STAMP) ## make .venv with Headway and everything that its tests need

demo: setup ## a long document and chats on one server: numbers, and a picture in out/
	@$(BIN)/headway demo

# Beside the checks one process collects the tests, so that the workers find their files compiled.
test: setup ## checks, then all tests but the long ones (about 6 minutes on 2 cores)
	@$(QUIET) $(BIN)/python -m pytest --collect-only -qq > /dev/null & $(MAKE) --no-print-directory check && wait
	@$(QUIET) $(BIN)/python -m pytest -m "not long" -n $(JOBS) --dist worksteal

test-long: setup ## clusters, hosts, chaos, pairs of parameters, more examples of properties, soaks (about half an hour)
	@$(MAKE) --no-print-directory ray || echo "SKIPPED: the tests of several hosts, which need Ray: no wheel"
	@$(QUIET) $(BIN)/python -m pytest -m "long and not soak" -n $(LONG_JOBS) --dist loadgroup --timeout 900
	@if $(call IN_TIME,2700,more examples of properties); then $(QUIET) HYPOTHESIS_PROFILE=thorough \
	$(BIN)/python -m pytest -m "hypothesis and not long" -n $(LONG_JOBS) --dist worksteal $(SEARCHED); fi
	@$(QUIET) $(BIN)/python -m pytest -m soak --timeout 900
	@if [ -n "$(IN_CI)" ]; then $(MAKE) --no-print-directory nixl || echo "SKIPPED: NIXL: no wheel"; fi
	@if [ -d .nixl/nixl ]; then $(QUIET) PYTHONPATH=.nixl $(BIN)/python -m pytest tests/transfer tests/e2e/test_cluster_nixl.py -k nixl; \
	else echo "skipped: KV by NIXL between native instances, which needs NIXL (make nixl, 0.5 GB)"; fi
	@if [ -d $(VLLM_VENV) ] || [ -n "$(IN_CI)" ]; then $(MAKE) --no-print-directory test-vllm; \
	else echo "skipped: the contract tests with vLLM, which need its environment (make vllm, 3.4 GB)"; fi

vllm: ## make .venv-vllm: vLLM for CPUs with this checkout beside it (3.4 GB, minutes)
	@$(PYTHON) scripts/make_vllm_env.py $(VLLM_VENV)

nixl: setup ## NIXL beside .venv, in .nixl, for hand-over of KV between servers of vLLM and between native instances (0.5 GB)
	@test -d .nixl/nixl || $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target .nixl \
		nixl==1.5.1 nixl-cu12==1.5.1

ray: setup ## Ray beside .venv, in .ray, for the tests of several hosts (0.25 GB)
	@test -d .ray/ray || $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target .ray \
		ray==2.60.0 msgpack==1.2.4 protobuf==7.36.2 requests==2.34.2 charset-normalizer==3.5.2

# In CI a wheel that cannot be had is a skip in so many words; anything else that fails, fails.
test-vllm: setup ## Headway inside vLLM's real scheduler (no weights, no server), a cluster of its servers; makes .venv-vllm
	@$(PYTHON) scripts/make_vllm_env.py $(VLLM_VENV) || { status=$$?; \
	if [ $$status -eq 75 ] && [ -n "$(IN_CI)" ]; then echo "SKIPPED: the contract tests with vLLM: no wheel"; exit 0; \
	fi; exit $$status; }; \
	$(QUIET) $(VLLM_VENV)/bin/python -m pytest tests/vllm/contract --noconftest -W ignore --timeout 600
	@if [ -n "$(IN_CI)" ] && [ -f $(VLLM_VENV)/.installed ] && $(call IN_TIME,2700,other versions of vLLM); then \
	$(QUIET) $(BIN)/python scripts/check_vllm_version.py --tests $(VLLM_VENV) || [ $$? -eq 75 ]; fi
	@if $(call IN_TIME,3000,live servers of vLLM); then \
	$(QUIET) $(BIN)/python -m pytest tests/conformance tests/vllm tests/docs -m long -k vllm --timeout 600; fi

check: setup ## lint, types, import layers
	@$(BIN)/ruff check src tests scripts benchmarks examples
	@$(BIN)/ruff format --check --quiet src tests scripts benchmarks examples
	@$(BIN)/mypy
	@$(BIN)/lint-imports

format: setup ## format the code
	@$(BIN)/ruff check --fix --quiet src tests scripts benchmarks examples
	@$(BIN)/ruff format src tests scripts benchmarks examples

bench: setup ## the figures that the README states, on this machine (about 10 minutes)
	@$(BIN)/python -m benchmarks.run

clients: setup ## third-party clients, each in an environment of its own, against a server; writes their table
	@$(BIN)/python -m benchmarks.clients.run

docs: setup ## the reference pages from the code, then the documentation site in build/site (strict)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[docs]'
	@$(BIN)/python scripts/make_reference.py
	@$(BIN)/python -m mkdocs build --quiet
	@echo "build/site/index.html"

figures: setup ## draw again the figures that README and docs show (minutes)
	@$(BIN)/python scripts/make_diagrams.py
	@$(BIN)/python -m scripts.make_figures
	-@$(BIN)/python -m scripts.make_live_picture
	@$(BIN)/python scripts/make_screens.py
	@$(BIN)/python -m scripts.make_transcripts

lock: setup ## requirements/*.lock: the versions of .venv, which CI and containers install
	@$(BIN)/python scripts/make_lock.py

audit: ## known vulnerabilities of the locked packages, looked up in PyPI's advisories (needs the network)
	@test -d build/audit || $(PYTHON) -m venv build/audit
	@build/audit/bin/python -m pip install --quiet --disable-pip-version-check "pip-audit>=2.10,<3"
	@build/audit/bin/python scripts/audit.py || { status=$$?; \
	if [ $$status -eq 75 ] && [ -n "$(IN_CI)" ]; then echo "SKIPPED: advisories cannot be reached"; exit 0; fi; \
	exit $$status; }

sbom: setup ## the packages that a server needs, with versions and licences (CycloneDX), in build/sbom.json
	@$(BIN)/python scripts/make_lock.py --sbom build/sbom.json

package: setup ## a source distribution, a wheel for all platforms, and one with machine code for this one, in dist/
	@HEADWAY_COMPILED=0 $(BIN)/python -m build --outdir dist
	@rm -rf build/lib* build/bdist*
	@HEADWAY_PREBUILT=1 $(BIN)/python -m build --wheel --no-isolation --outdir dist
	@rm -rf build/lib* build/bdist*

embedded: setup ## make the embedded model again
	@$(BIN)/python scripts/make_embedded_model.py

clean: ## remove what was built
	@rm -rf $(VENV) build dist out *.egg-info src/*.egg-info
