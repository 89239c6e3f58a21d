"""A run deletes a checkpoint while an export or a decoder reads it: one sentence, and no file."""

import shutil
import sys

import pytest

from bloomery.core.errors import UserError
from bloomery.export.gguf import export_gguf
from bloomery.export.layouts import draft_of, export
from bloomery.infer.load import Use, load_used
from bloomery.infer.model_folder import find_model
from models_for_tests import make_model


@pytest.mark.parametrize("reader", ["hf", "gguf", "load"])
def test_the_error_names_the_deleted_step_and_those_left(tmp_path, reader):
    checkpoints = tmp_path / "run" / "checkpoints"
    folder = make_model(checkpoints / "step-00000010")
    shutil.copytree(folder, checkpoints / "step-00000020")
    files = find_model(folder)
    shutil.rmtree(folder)
    out = tmp_path / "out"
    with pytest.raises(UserError, match="step 10 was deleted meanwhile; left: 20") as caught:
        if reader == "hf":
            export(files.weights, out)
        elif reader == "gguf":
            export_gguf(files, out)
        else:
            load_used(files, Use("cpu"))
    assert "checkpoint.keep" in caught.value.fix
    assert not list(tmp_path.glob("*out*"))


def test_a_deletion_in_the_middle_of_an_export(tmp_path, monkeypatch):
    checkpoints = tmp_path / "run" / "checkpoints"
    folder = make_model(checkpoints / "step-00000010")

    # The run deletes the checkpoint when the export has its config and begins to read the weights.
    layouts = sys.modules[draft_of.__module__]
    copy_weights = layouts._copy_weights

    def copy_after_deletion(*arguments):
        shutil.rmtree(folder)
        copy_weights(*arguments)

    monkeypatch.setattr(layouts, "_copy_weights", copy_after_deletion)
    with pytest.raises(UserError, match="step 10 was deleted meanwhile; left: none"):
        export(folder, tmp_path / "out", dtype="float32")
    assert not list(tmp_path.glob("*out*"))
