# make demo    see a file multicast and verified, on any machine
# make test    prove everything, in minutes
# make test-all  the same with long runs, a second kernel, sanitizers in the lab, Debian 13
# make fuzz    give strangers' bytes to everything that reads them
PYTHON ?= $(shell command -v python3 || command -v python3.14 || command -v python3.13 || command -v python3.12 || command -v python3.11)
N ?= 2000000
SECONDS ?= 600
MINUTES ?= 60
WHEELS ?= dist
TORCH ?= torch==2.13.0+cpu
PYTHONS ?= $(PYTHON)
BIN := .venv/bin
SOURCES := pyproject.toml lab/pyproject.toml $(wildcard setup.py mcast/arguments/csrc/* mcast/backends/udp/csrc/* mcast/cast/csrc/* mcast/backends/rdma/csrc/*.* mcast/backends/rdma/csrc/calls/*)
export PIP_DISABLE_PIP_VERSION_CHECK = 1
# Bytecode is kept, whatever the caller's habit: the suite starts hundreds of interpreters, some in an emulated guest.
unexport PYTHONDONTWRITEBYTECODE

.DELETE_ON_ERROR:
SECOND_KERNEL ?= 6.12

.PHONY: demo test test-all coverage lint types docs sessions generated soak soak-served soak-lab soak-replicas bench mutants oracle wheel test-wheel test-free-threaded test-torch release api test-asan test-tsan fuzz clean test-packages test-debian12 test-debian13

demo: .venv/demo
	@$(BIN)/mcast demo $(ARGS)

# Four workers on two processors: one waits for the guest of the lab most of the time, others for threads.
# `make lint` runs beside the tests, and is shown if it fails.
test: .venv/test
	@mkdir -p build; $(MAKE) --no-print-directory lint >build/lint.log 2>&1 & lint=$$!; \
	$(BIN)/pytest -n 4 --dist loadfile --no-loadscope-reorder $(ARGS); tests=$$?; \
	wait $$lint || { cat build/lint.log; echo "make lint failed: see above"; exit 1; }; exit $$tests

# Before a release, and after a change of what only this covers: docs/dev/testing.md, "What runs where".
test-all: .venv/test
	@PYTHON="$(PYTHON)" scripts/bootstrap fresh
	$(BIN)/mcast lab kernel $(SECOND_KERNEL)
	$(BIN)/pytest -n 4 --dist loadfile --no-loadscope-reorder --long --oracle-requests $(N) $(ARGS)
	$(BIN)/pytest --long --lab-kernel $(SECOND_KERNEL) tests/lab/test_guest.py
	$(BIN)/pytest --lab-kernel $(SECOND_KERNEL) tests/lab/test_infiniband_suite.py
	$(BIN)/pytest --long --lab-kernel $(SECOND_KERNEL) tests/lab/test_infiniband_incidents.py
	$(BIN)/pytest --long --lab-kernel $(SECOND_KERNEL) tests/lab/test_infiniband_rc.py
	scripts/asan
	$(MAKE) coverage
	$(MAKE) types
	$(MAKE) api
	$(MAKE) test-debian13

# Which lines and branches of the package no test on the host runs, and that they are no more than before.
coverage: .venv/test
	rm -rf build/coverage
	$(BIN)/coverage run -m pytest -n 4 --dist loadfile --no-loadscope-reorder \
		--deselect tests/endpoint/test_storm.py $(ARGS)
	$(BIN)/coverage combine -q
	$(BIN)/coverage report

# The project's code, and the Python that its pages show. Pages that speak of other things than None are not typed.
UNTYPED_PAGES := contract files_and_captures patterns pitfalls
lint: .venv/test
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/lint-imports
	$(BIN)/python -m scripts.page_programs build/pages
	$(BIN)/ruff check --isolated --no-cache --line-length 92 --select E,F,B,UP build/pages
	$(BIN)/ruff format --isolated --no-cache --line-length 92 --check build/pages
	cd build/pages && rm -r $(UNTYPED_PAGES)
	MYPYPATH=$$(ls -d build/pages/* | paste -sd:) $(BIN)/mypy mcast lab/rdma_lab tests benchmarks examples build/pages

# As the oldest and the newest Python type their standard library; what changed in between, one of the two shows.
types: .venv/test
	for version in 3.11 3.14; do $(BIN)/mypy --python-version $$version || exit; done

# Into build/site; --quiet would hide warnings from strictness. The variable silences an advertisement.
docs: .venv/test
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

# The README's picture, and the recorded terminal sessions of the documentation.
sessions: .venv/test
	$(BIN)/python scripts/pictures.py
	$(BIN)/python scripts/record_sessions.py

# What is made from the code: the manual pages, the JSON schemas, and tables of the documentation.
generated: .venv/test
	for each in man schemas tables; do $(BIN)/python -m scripts.$$each || exit; done

# Everything at once, for so many MINUTES on a served fabric, and for as many in the lab: memory stays flat, and nothing
# stays open. `make -j2` does both at once.
soak: soak-served soak-lab soak-replicas

soak-served: .venv/test
	$(BIN)/python -m tests.soak --minutes $(MINUTES)

soak-replicas: .venv/test
	$(BIN)/python -m tests.soak --replicas --minutes $(MINUTES)

soak-lab: .venv/test
	$(BIN)/mcast lab run --fabric infiniband --ports 8 -- $(BIN)/python -m tests.soak --guest --minutes $(MINUTES)

# Beside UDP sockets here, and beside C and pyverbs in the lab; then what moved since the last release.
bench: .venv/test
	@PYTHON="$(PYTHON)" scripts/bootstrap bench
	$(BIN)/pytest benchmarks $(ARGS)
	$(BIN)/python -m benchmarks.served --keep build/bench/served.ratios.json
	$(BIN)/python -m benchmarks.rdma.overhead
	$(BIN)/python -m benchmarks.rdma.fast_calls
	$(BIN)/python -m benchmarks.rdma.compare
	$(BIN)/mcast lab run --ports 4 --share build/bench -- $(BIN)/pytest benchmarks/rdma --benchmark-json build/bench/ours.json
	$(BIN)/python benchmarks/ratios.py build/bench/*.ratios.json

# Mistakes planted by rule in a random share of the lines: how many no test and no type finds, and which.
mutants: .venv/test
	$(BIN)/pip install -q -e '.[mutants]'
	nice $(BIN)/python scripts/mutants.py $(ARGS)

# A long run of the comparison with OpenSM; `make test` has a short one.
oracle: .venv/test
	$(BIN)/pytest tests/oracle -s --oracle-requests $(N) $(ARGS)

# What goes to PyPI, audited, into an empty WHEELS; a wheel for each Python without a GIL in FREE_THREADED, too.
wheel: .venv/test
	$(BIN)/pip install -q -e '.[wheels]'
	$(BIN)/python scripts/wheels.py $(WHEELS) $(FREE_THREADED)

# As a stranger does it: each of PYTHONS installs the wheel of this processor, and runs demo and suite, where no warning
# says that a GIL has been turned on. A Python without a GIL takes its own wheel, or the one without C.
test-wheel:
	set -e; for python in $(PYTHONS); do \
		where=build/wheel/$$(basename $$python); $$python -m venv --clear $$where; \
		abi=$$($$python -c 'import sys, sysconfig as s; \
			print("cp%d%dt" % sys.version_info[:2] if s.get_config_var("Py_GIL_DISABLED") else "abi3")'); \
		wheel=$$(ls $(WHEELS)/rdma_mcast-*-$$abi-*$$(uname -m).whl || { [ $$abi != abi3 ] && ls $(WHEELS)/rdma_mcast-*-py3-none-any.whl; }); \
		$$where/bin/pip install -q $$wheel'[conformance]'; \
		(cd $$where && export PYTHONWARNINGS=error::RuntimeWarning && bin/python -VV && \
		bin/mcast info && bin/mcast demo --size 1M && \
		bin/mcast conformance --backend sim-roce --backend sim-ib); done

# On each Python without a GIL in FREE_THREADED: tests of the C core and of what stands on it, and those that hold beside
# themselves in four threads at once. A warning that the GIL has been turned on fails a test.
CORE_TESTS := tests/card tests/interrupts tests/contract tests/endpoint tests/sim
PARALLEL_TESTS := tests/card tests/contract/test_contract.py tests/contract/test_registry.py tests/endpoint tests/sim
test-free-threaded:
	set -e; for python in $(FREE_THREADED); do \
		where=build/free-threaded/$$(basename $$python); $$python -m venv --clear $$where; \
		MCAST_RDMA=1 $$where/bin/pip install -q -e '.[free-threaded]'; \
		$$where/bin/pytest -n 2 --dist loadfile --ignore tests/card/test_sanitized.py $(CORE_TESTS); \
		$$where/bin/python -m pytest -n 0 --ignore tests/card/test_sanitized.py -p tests.parallel \
			--parallel-threads 4 --iterations 2 --skip-thread-unsafe True --mark-hypothesis-as-unsafe \
			$(PARALLEL_TESTS); done

# Collectives among the ranks of PyTorch jobs. Where pip's index has no CPU build:
# PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu
test-torch: .venv/test build/torch
	PYTHONPATH=$(CURDIR)/build/torch $(BIN)/pytest tests/collective/torch \
		'tests/house/test_examples.py::test_an_example_passes_its_tests[torch_weights]' $(ARGS)

build/torch:
	$(BIN)/pip install -q --target $@ '$(TORCH)'

# As on a fresh machine: what a Debian of its own lacks is installed, then `make demo` and `make test` on HEAD. Needs root.
test-debian12: RELEASE := bookworm
test-debian13: RELEASE := trixie
test-debian12 test-debian13:
	@PYTHON="$(PYTHON)" scripts/bootstrap fresh
	scripts/fresh-debian $(RELEASE) demo test

# A release: its files in an empty WHEELS, audited, and its notes; or what is missing for one, in a sentence each.
release: .venv/test
	@$(BIN)/python scripts/release.py >/dev/null
	$(MAKE) wheel
	@$(BIN)/python scripts/release.py

# Which public names of the last release programs would miss, unless CHANGELOG.md says so.
api: .venv/test
	@$(BIN)/python scripts/release.py breaks

# The C core under AddressSanitizer and UndefinedBehaviorSanitizer, in the lab.
test-asan: .venv/test
	scripts/asan $(ARGS)

# The C core and a card made of memory under ThreadSanitizer, on the host.
test-tsan: .venv/test
	$(BIN)/python -m tests.card.run_sanitized thread $(ARGS)

# All targets, or those in ARGS, for so many SECONDS together; guided by coverage if atheris has a wheel here.
fuzz: .venv/test
	@$(BIN)/pip install -q --only-binary :all: 'atheris>=2.3' || echo "fuzz: no wheel of atheris for this Python"
	$(BIN)/python -m tests.fuzz.run --seconds $(SECONDS) $(ARGS)

clean:
	rm -rf .venv build dist report .benchmarks .hypothesis *.egg-info lab/build lab/*.egg-info .mypy_cache .pytest_cache .ruff_cache

.venv/bin/python:
	@PYTHON="$(PYTHON)" scripts/bootstrap demo
	@"$(PYTHON)" -m venv .venv

.venv/demo: .venv/bin/python $(SOURCES)
	@echo "installing mcast into .venv"
	@$(BIN)/pip install -q -e ./lab -e .
	@touch $@

.venv/test: .venv/bin/python $(SOURCES) | test-packages
	@echo "installing mcast and its test tools into .venv"
	@start=$$(date +%s); $(BIN)/pip install -q -e ./lab -e '.[test,lab]' && echo "installed in $$(($$(date +%s) - start)) s"
	@touch $@ .venv/demo

test-packages: | .venv/bin/python
	@PYTHON="$(PYTHON)" scripts/bootstrap test
