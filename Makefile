# Everything runs in .venv, which `make setup` makes once. PYTHON=python3.12 or TORCH=2.9.1 choose another.
PYTHON ?= python3
# Processes of `make test`, counted in the environment that the set-up has made.
JOBS ?= $$($(PY) scripts/jobs_of_tests.py)
PY := .venv/bin/python

.PHONY: setup demo quick test device check pages plan-pages docs triton soak bench clean clean-venv

setup:
	@$(PYTHON) scripts/setup.py
	@echo "next       source .venv/bin/activate"
	@echo "           bloomery doctor          check this machine"
	@echo "           bloomery demo            train a small model here"

demo:
	@$(PYTHON) scripts/setup.py
	@$(PY) -m bloomery demo

# Leaves out the other folders (model, train, runs, serve, ...), and in these the files that try every GPU, mesh, model and
# every kind of dataset, and each test that starts a process or trains: `--quick` (tests/conftest.py) notices that when
# it happens.
QUICK := core recipe plan data hardware monitor evals
EXHAUSTIVE := data/test_prepare.py plan/test_every_gpu.py plan/test_every_mesh.py plan/test_without_data.py

quick:
	@$(PYTHON) scripts/setup.py test
	@$(PY) -m pytest --quick -n 2 --dist loadfile --no-loadscope-reorder $(QUICK:%=tests/%) $(EXHAUSTIVE:%=--ignore tests/%)

test:
	@$(PYTHON) scripts/setup.py test
	@$(PY) -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder
	@$(PY) tests/device/run.py -n $(JOBS) --dist loadfile --no-loadscope-reorder $(DEVICE_TESTS)

# Tests on a GPU that is not there (docs/contributing/simulated-gpu.md): a process has it from its start, so that they are
# a command of their own. `make device DEVICE_TESTS="tests/train/test_loop.py -x"` runs others on it.
DEVICE_TESTS := sample
device:
	@$(PYTHON) scripts/setup.py test
	@$(PY) tests/device/run.py $(DEVICE_TESTS)

check:
	@$(PYTHON) scripts/setup.py check
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check -q src
	@$(PY) -m mypy
	@$(PY) -c "import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports())"
	@$(PY) scripts/house.py
	@$(PY) scripts/words.py

# The pages that are made from the code, in seconds. Apart are: plan_pages.py (output of `bloomery plan` in the docs, a
# minute: `make plan-pages`), methods_page.py --draw (benchmarks/methods.py measures first, an hour), triton_tiles.py
# (needs Triton), and the golden outputs of tests (BLOOMERY_UPDATE=1 python -m pytest tests/docs).
PAGES := reference_pages symptoms support_page models_page cards_page migration_pages pipeline_page methods_page triton_page which_model_page stream_page sweep_page tree
pages:
	@$(PYTHON) scripts/setup.py test
	@for page in $(PAGES); do $(PY) scripts/$$page.py || exit 1; done

plan-pages:
	@$(PYTHON) scripts/setup.py test
	@$(PY) scripts/plan_pages.py

docs:
	@$(PYTHON) scripts/setup.py docs
	@NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict --quiet
	@echo "site/index.html"

# Compiles kernels for GPUs that are not here, and runs them on the CPU; PyTorch for the CPU brings none. 0.9 GB.
TRITON := 3.8.0
TRITON_FOLDER := $(HOME)/.cache/bloomery/triton-$(TRITON)
triton:
	@$(PYTHON) scripts/setup.py test
	@test -d $(TRITON_FOLDER)/triton || $(PY) -m pip install --quiet --no-deps --retries 1 --target $(TRITON_FOLDER) triton==$(TRITON)

soak: triton
	@$(PY) -m pytest -m soak --timeout=7200
	@$(PY) tests/device/run.py sample -m soak --timeout=7200
	@$(PY) tests/device/run.py more --timeout=7200
	@$(PY) tests/device/run.py --stream 2 streamed --timeout=7200
	@$(PY) tests/device/run.py --device intel,2,4 tests/device/test_intel.py

bench:
	@$(PYTHON) scripts/setup.py test
	@$(PY) benchmarks/pretrain_cpu.py

clean:
	rm -rf site .pytest_cache .mypy_cache .ruff_cache .import_linter_cache build dist
	find . -name __pycache__ -type d -not -path './.venv/*' -prune -exec rm -rf {} +

clean-venv:
	rm -rf .venv
