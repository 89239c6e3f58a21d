"""Reading tensors in pieces: the same numbers whatever the size of the stage, the dtype and the way they lie."""

import pytest
import torch
from safetensors.torch import save_file

from bloomery.core.errors import UserError
from bloomery.model.io import safetensors as tensors
from bloomery.model.io.safetensors import TensorReader
from bloomery.model.io.stored import stored_tensors

CPU = torch.device("cpu")


@pytest.fixture
def small_stage(monkeypatch):
    monkeypatch.setattr(tensors, "STAGE_BYTES", 100)


@pytest.fixture
def saved_tensors(tmp_path):
    torch.manual_seed(0)
    tensors_in_memory = {
        "matrix": torch.randn(23, 7),
        "vector": torch.randn(50),
        "number": torch.tensor(3.5),
    }
    save_file(tensors_in_memory, tmp_path / "x.safetensors")
    return tensors_in_memory, stored_tensors(tmp_path / "x.safetensors")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["matrix", "vector", "number"])
def test_a_target_is_filled_and_cast(saved_tensors, small_stage, name, dtype):
    tensors_in_memory, tensors_in_file = saved_tensors
    target = torch.empty(tensors_in_memory[name].shape, dtype=dtype)
    with TensorReader() as reader:
        reader.fill(target, tensors_in_file[name], first=0, transposed=False)
    assert torch.equal(target, tensors_in_memory[name].to(dtype))


def test_rows_and_transposed_columns(saved_tensors, small_stage):
    tensors_in_memory, tensors_in_file = saved_tensors
    rows = torch.empty(9, 7, dtype=torch.float64)
    columns = torch.empty(3, 23, dtype=torch.float16)
    with TensorReader() as reader:
        reader.fill(rows, tensors_in_file["matrix"], first=5, transposed=False)
        reader.fill(columns, tensors_in_file["matrix"], first=2, transposed=True)
    assert torch.equal(rows, tensors_in_memory["matrix"][5:14].double())
    assert torch.equal(columns, tensors_in_memory["matrix"][:, 2:5].t().half())


@pytest.mark.parametrize(
    ("multiple", "sizes"), [(1, [3] * 7 + [2]), (4, [4] * 5 + [3]), (64, [23])]
)
def test_pieces_are_whole_multiples_of_rows(saved_tensors, small_stage, multiple, sizes):
    tensors_in_memory, tensors_in_file = saved_tensors
    with TensorReader() as reader:
        pieces = [
            (first, piece.clone())
            for first, piece in reader.pieces(
                tensors_in_file["matrix"], 0, 23, device=CPU, multiple=multiple
            )
        ]
    assert [len(piece) for _, piece in pieces] == sizes
    assert [first for first, _ in pieces] == [sum(sizes[:index]) for index in range(len(sizes))]
    assert torch.equal(torch.cat([piece for _, piece in pieces]), tensors_in_memory["matrix"])


def test_a_file_that_shrinks_meanwhile_is_an_error_not_a_crash(
    saved_tensors, small_stage, tmp_path
):
    _, tensors_in_file = saved_tensors
    with TensorReader() as reader:
        pieces = reader.pieces(tensors_in_file["matrix"], 0, 23, device=CPU)
        next(pieces)
        with (tmp_path / "x.safetensors").open("r+b") as file:
            file.truncate(tensors_in_file["matrix"].offset + 100)
        with pytest.raises(UserError, match="ends too early"):
            list(pieces)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_every_piece_reaches_a_gpu(saved_tensors, small_stage):
    tensors_in_memory, tensors_in_file = saved_tensors
    target = torch.empty(23, 7, device="cuda", dtype=torch.bfloat16)
    with TensorReader() as reader:
        reader.fill(target, tensors_in_file["matrix"], first=0, transposed=False)
    assert torch.equal(target.cpu(), tensors_in_memory["matrix"].bfloat16())
