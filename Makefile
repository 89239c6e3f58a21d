# Everything runs in .venv, which `make setup` makes once. PYTHON=python3.12 or TORCH=2.9.1 choose another.
PYTHON ?= python3
JOBS ?= 3   # on two cores: the third works while the others wait for a child
PY := .venv/bin/python

.PHONY: setup demo quick test check docs soak bench clean clean-venv

setup:
	@$(PYTHON) scripts/setup.py
	@echo "next       source .venv/bin/activate"
	@echo "           bloomery doctor          check this machine"
	@echo "           bloomery demo            train a small model here"

demo:
	@$(PYTHON) scripts/setup.py
	@$(PY) -m bloomery demo

# Leaves out the other folders (model, train, runs, serve, ...), and in these the longest file and each test that
# starts a process or trains:
# `--quick` (tests/conftest.py) notices that when it happens.
QUICK := core recipe plan data hardware monitor runs/tasks

quick:
	@$(PYTHON) scripts/setup.py test
	@$(PY) -m pytest --quick -n 2 --dist loadfile --no-loadscope-reorder $(QUICK:%=tests/%) --ignore tests/data/test_prepare.py

test:
	@$(PYTHON) scripts/setup.py test
	@$(PY) -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder

check:
	@$(PYTHON) scripts/setup.py check
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check -q src
	@$(PY) -m mypy
	@$(PY) -c "import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports())"
	@$(PY) scripts/house.py
	@$(PY) scripts/words.py

docs:
	@$(PYTHON) scripts/setup.py docs
	@NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict --quiet
	@echo "site/index.html"

soak:
	@$(PYTHON) scripts/setup.py test
	@$(PY) -m pytest -m soak --timeout=7200

bench:
	@$(PYTHON) scripts/setup.py test
	@$(PY) benchmarks/pretrain_cpu.py

clean:
	rm -rf site .pytest_cache .mypy_cache .ruff_cache .import_linter_cache build dist
	find . -name __pycache__ -type d -not -path './.venv/*' -prune -exec rm -rf {} +

clean-venv:
	rm -rf .venv
