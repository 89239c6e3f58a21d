"""The notebook of the tutorials runs: in a Jupyter kernel where nbclient is installed, else its cells as a script."""

import importlib.util
import json
import os
import subprocess
import sys

import pytest
from words_of_docs import ROOT

NOTEBOOK = ROOT / "docs/tutorials/notebook.ipynb"
KERNEL = all(importlib.util.find_spec(name) for name in ("nbclient", "ipykernel"))


@pytest.mark.skipif(KERNEL, reason="a kernel runs them")
def test_every_cell_runs_as_a_script(tmp_path):
    cells = [
        cell
        for cell in json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
        if cell["cell_type"] == "code"
    ]
    short = "\n".join("".join(cell["source"]) for cell in cells).replace(
        '"max_steps": 30', '"max_steps": 10'
    )
    (tmp_path / "cells.py").write_text(
        short.replace("max_steps=40", "max_steps=12"), encoding="utf-8"
    )
    env = os.environ | {
        "OMP_NUM_THREADS": "1",
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
        "HF_HUB_OFFLINE": "1",
    }
    command = [sys.executable, "cells.py"]
    done = subprocess.run(
        command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "tiny-model/model.safetensors").is_file()


@pytest.mark.soak
@pytest.mark.skipif(not KERNEL, reason="needs nbclient and ipykernel")
def test_a_kernel_shows_progress_in_place_and_the_plot_as_an_image(tmp_path, monkeypatch):
    """BLOOMERY_UPDATE=1 also stores the new outputs in the notebook."""
    import nbformat
    from nbclient import NotebookClient

    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    NotebookClient(
        notebook, timeout=280, kernel_name="python3", resources={"metadata": {"path": tmp_path}}
    ).execute()
    cells = [cell for cell in notebook.cells if cell["cell_type"] == "code"]
    shown = {
        cell["source"].splitlines()[-1]: [
            one.get("data", {}) for one in cell["outputs"] if one.get("name") != "stderr"
        ]
        for cell in cells
    }
    # one output for each stage
    _prepared, trained = shown["run = bloomery.train(recipe, on_event=remember)"]
    assert (
        "done · step 30 of 30" in trained["text/html"]
        and "done · step 30 of 30" in trained["text/plain"]
    )
    assert shown["run.plot()"][0]["image/svg+xml"].startswith("<svg xmlns=")
    assert [one["text/plain"] for one in shown[cells[-2]["source"].splitlines()[-1]]] == ["40"]
    assert [one["text/plain"] for one in shown[cells[-1]["source"].splitlines()[-1]] if one][
        -1
    ] == "True"
    if os.environ.get("BLOOMERY_UPDATE"):
        for cell in cells:
            cell["metadata"], cell["outputs"] = (
                {},
                [one for one in cell["outputs"] if one.get("name") != "stderr"],
            )
        nbformat.write(notebook, NOTEBOOK)
