# `make demo` and `make test` are all a new machine needs: each sets up .venv first, and only when something changed.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
RUN := OMP_NUM_THREADS=1 $(BIN)/dynamiccl
DEMO_STEPS ?= 600
SOURCES := agent envs examples traces zero_workload tests
C_SOURCES := $(wildcard envs/nccl/plugin/*.[ch] envs/sim/*.c tests/tools/*.[ch])

# Pages whose prose proselint checks. What it says of typography, repeated words and times of day concerns code and tables.
PAGES := README.md OPERATING.md CONTRIBUTING.md $(wildcard docs/*.md */README.md envs/*/README.md)
NOT_PROSE := typography|lexical_illusions|dates_times

# Each of the many processes that tests start would compile the tree anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo axe docs pictures test test-slow test-ci test-random test-timing test-all test-next coverage check format setup bench gpu-check model-check clean

demo: setup
	$(RUN) demo --steps $(DEMO_STEPS)

# What takes seconds, four at a time.
test: setup $(VENV)/frameworks axe
	$(BIN)/python -m pytest -m "not slow and not timing" -n 4 --dist loadfile --no-loadscope-reorder

# The rest: whole tuned jobs, restarts, killed and frozen processes, wheels on every Python; an hour, and then test-random.
# It names each test, so that a run that is cut short says how far it came and what failed. CI runs those that take up to
# 12 seconds each.
SLOW := -m pytest -vv -n 2 --dist loadfile --no-loadscope-reorder --durations=25
test-slow: setup $(VENV)/frameworks
	$(BIN)/python $(SLOW) -m "slow and not timing"
	$(MAKE) test-random
test-ci: setup $(VENV)/frameworks
	$(BIN)/python $(SLOW) -m "slow and not long and not timing"

# The property tests, on examples that are drawn anew: `make test` draws the same ones each time. The seed that is printed
# draws these again.
test-random: setup
	seed=$$(date +%s); echo "property tests on random examples, --hypothesis-seed=$$seed"; \
	HYPOTHESIS_PROFILE=random $(BIN)/python -m pytest -m "hypothesis and not slow" -n 2 --hypothesis-seed=$$seed

# Those that compare times, one after the other: for a machine that does nothing else.
test-timing: setup $(VENV)/frameworks
	$(BIN)/python -m pytest -m timing

# Everything, as long as it takes, hours, and 45 minutes of them for all but every state of the protocol; two soaks of the
# daemon of ten minutes each in place of 20 seconds, 200 jobs with a fault at random in place of 12, and sanitizers.
test-all: setup $(VENV)/frameworks
	@echo "1/4 every state of the protocol"
	$(BIN)/python tests/tools/protocol_model.py
	@echo "2/4 soaks of ten minutes, 200 jobs with a fault"
	SOAK_S=600 FAULTS=200 $(BIN)/python -m pytest -v tests/envs/live/test_event_path.py tests/envs/nccl/test_agreement.py
	@echo "3/4 all other tests"
	$(BIN)/python -m pytest --ignore tests/envs/live/test_event_path.py --ignore tests/envs/nccl/test_agreement.py
	@echo "4/4 property tests on random examples"
	$(MAKE) test-random

# The next PyTorch, in an environment of its own: the probe, the launcher, the frameworks and the emulation, with both
# backends that may be behind the name "nccl". 2.14.1 has both; 2.15 makes the second one the default.
NEXT := .venv-next
NEXT_TORCH ?= 2.14.1
NEXT_TESTS := $(addprefix tests/envs/nccl/test_,probe.py probe_memory.py probe_lifetime.py attach.py store.py quiet.py) \
	tests/agent/daemon/test_launcher.py tests/envs/sim/test_emulated.py tests/project/test_next_torch.py
test-next: $(NEXT)/ready
	for nccl2 in 0 1; do \
		echo "PyTorch $(NEXT_TORCH), TORCH_DIST_USE_NCCL2=$$nccl2"; \
		TORCH_DIST_USE_NCCL2=$$nccl2 OMP_NUM_THREADS=1 $(NEXT)/bin/python -m pytest -n 2 --dist loadfile \
			-k "not real_store and not load_10" $(NEXT_TESTS) || exit 1; \
	done

# By pip: it finds PyTorch where its settings say. A CUDA build, 5.6 GB.
$(NEXT)/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(NEXT)
	$(NEXT)/bin/python -m pip install --quiet --disable-pip-version-check torch==$(NEXT_TORCH)
	grep -v '^torch==' constraints.txt > $(NEXT)/constraints.txt
	DS_BUILD_OPS=0 $(NEXT)/bin/python -m pip install --quiet --disable-pip-version-check \
		--constraint $(NEXT)/constraints.txt --editable '.[train,dev,frameworks]'
	touch $@

# Lines and branches that the quick tests run, those of the processes that they start included, by folder.
coverage: setup $(VENV)/frameworks
	$(BIN)/python -m pytest -m "not slow and not timing" -n 4 --dist loadfile --cov --cov-report=
	$(BIN)/python tests/tools/coverage_by_folder.py

check: setup
	$(BIN)/ruff format --check $(SOURCES) *.py
	$(BIN)/ruff check $(SOURCES) *.py
	$(BIN)/clang-format --dry-run --Werror $(C_SOURCES)
	mkdir -p build && ln -sfn .. build/dynamiccl
	MYPYPATH=build $(BIN)/mypy -p dynamiccl.agent -p dynamiccl.envs -p dynamiccl.traces -p dynamiccl.zero_workload
	$${CC:-cc} -std=c11 -D_GNU_SOURCE -Wall -Wextra -Werror -fsyntax-only envs/nccl/plugin/*.c envs/sim/*.c
	@$(BIN)/python tests/tools/count_lines.py
	@! $(BIN)/proselint check $(PAGES) | grep -E '^/.*:[0-9]+:[0-9]+: ' | grep -vE ': ($(NOT_PROSE))'
	$(BIN)/python -m pytest -q tests/project/test_layers.py tests/project/test_limits.py

format: setup
	$(BIN)/ruff check --fix-only --quiet $(SOURCES)
	$(BIN)/ruff format $(SOURCES)
	$(BIN)/clang-format -i $(C_SOURCES)

# The boards from nothing, put on record and into envs/README.md: hours of two cores.
bench: setup
	for board in standard:400 held-out:200 unseen:200 mpi-headroom:200; do \
		$(RUN) bench --suite $${board%:*} --jobs $${board#*:} && \
		$(BIN)/python tests/tools/make_board.py $${board%:*} || exit 1; done

# Nine minutes on a machine with GPUs; the folder of results lies in envs/results/. Without a GPU it runs on the emulated
# cluster in under three minutes and leaves its folder in runs/.
gpu-check: setup
	$(RUN) lab gpu-check

# Every state of the protocol by which the ranks change tables, with every kind of bad luck; many hours.
model-check: setup
	$(BIN)/python tests/tools/protocol_model.py

setup: $(VENV)/ready

# uv resolves and installs in seconds what takes pip a minute. It does not read pip's settings: these it is told.
as_uv = $(if $($(1)),$(if $($(2)),,$(eval export $(2) := $($(1)))))
$(call as_uv,PIP_FIND_LINKS,UV_FIND_LINKS)
$(call as_uv,PIP_INDEX_URL,UV_DEFAULT_INDEX)
$(call as_uv,PIP_EXTRA_INDEX_URL,UV_INDEX)
$(call as_uv,PIP_CERT,SSL_CERT_FILE)

$(VENV)/ready: pyproject.toml setup.py dynamiccl_autoload.py constraints.txt
	$(PYTHON) -c 'import sys; sys.exit("dynamiccl needs Python 3.11 or newer: make PYTHON=python3.12 demo" if sys.version_info < (3, 11) else 0)'
	$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check uv
	$(BIN)/uv pip install --quiet --python $(BIN)/python \
		--constraint constraints.txt --editable '.[train,plot,dev,optimizers]'
	touch $@

# The other frameworks that the probe is tested in. Where they cannot be installed their tests say so and are skipped;
# `make -B .venv/frameworks` tries again. Compiled once: the tests start hundreds of processes that import PyTorch.
$(VENV)/frameworks: pyproject.toml constraints.txt | setup
	DS_BUILD_OPS=0 $(BIN)/uv pip install --quiet \
		--python $(BIN)/python --constraint constraints.txt --editable '.[frameworks]' \
		|| echo "accelerate and deepspeed cannot be installed: their tests will be skipped"
	$(BIN)/python -m compileall -q -j 0 $(VENV)/lib/python*/site-packages > /dev/null 2>&1 || true
	touch $@

# axe-core, by which the tests look at our pages: where there are npm and Chromium (Debian: apt-get install chromium).
axe:
	@if [ ! -d node_modules/axe-core ] && command -v npm > /dev/null && command -v chromium > /dev/null; then \
		npm install --no-save --no-package-lock --silent axe-core || echo "no axe-core: its tests are skipped"; fi

# The pictures of the pages, each of recorded data. A test fails if they are stale.
pictures: setup
	$(BIN)/python tests/tools/make_pictures.py

# The documentation site, in build/docs. A warning is an error.
docs: $(VENV)/docs
	$(BIN)/sphinx-build -q -W --keep-going -b html docs build/docs
	@echo "build/docs/index.html"

$(VENV)/docs: pyproject.toml constraints.txt | setup
	$(BIN)/uv pip install --quiet --python $(BIN)/python --constraint constraints.txt --editable '.[docs]'
	touch $@

clean:
	rm -rf build dist .mypy_cache .pytest_cache .ruff_cache
