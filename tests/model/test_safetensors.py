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
def saved(tmp_path):
    torch.manual_seed(0)
    held = {"matrix": torch.randn(23, 7), "vector": torch.randn(50), "number": torch.tensor(3.5)}
    save_file(held, tmp_path / "x.safetensors")
    return held, stored_tensors(tmp_path / "x.safetensors")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["matrix", "vector", "number"])
def test_a_target_is_filled_and_cast(saved, small_stage, name, dtype):
    held, stored = saved
    target = torch.empty(held[name].shape, dtype=dtype)
    with TensorReader() as reader:
        reader.fill(target, stored[name], first=0, transposed=False)
    assert torch.equal(target, held[name].to(dtype))


def test_rows_and_transposed_columns(saved, small_stage):
    held, stored = saved
    rows, columns = torch.empty(9, 7, dtype=torch.float64), torch.empty(3, 23, dtype=torch.float16)
    with TensorReader() as reader:
        reader.fill(rows, stored["matrix"], first=5, transposed=False)
        reader.fill(columns, stored["matrix"], first=2, transposed=True)
    assert torch.equal(rows, held["matrix"][5:14].double())
    assert torch.equal(columns, held["matrix"][:, 2:5].t().half())


@pytest.mark.parametrize(
    ("multiple", "sizes"), [(1, [3] * 7 + [2]), (4, [4] * 5 + [3]), (64, [23])]
)
def test_pieces_are_whole_multiples_of_rows(saved, small_stage, multiple, sizes):
    held, stored = saved
    with TensorReader() as reader:
        found = [
            (first, piece.clone())
            for first, piece in reader.pieces(
                stored["matrix"], 0, 23, device=CPU, multiple=multiple
            )
        ]
    assert [len(piece) for _, piece in found] == sizes
    assert [first for first, _ in found] == [sum(sizes[:index]) for index in range(len(sizes))]
    assert torch.equal(torch.cat([piece for _, piece in found]), held["matrix"])


def test_a_file_that_shrinks_meanwhile_is_an_error_not_a_crash(saved, small_stage, tmp_path):
    _, stored = saved
    with TensorReader() as reader:
        pieces = reader.pieces(stored["matrix"], 0, 23, device=CPU)
        next(pieces)
        with (tmp_path / "x.safetensors").open("r+b") as file:
            file.truncate(stored["matrix"].offset + 100)
        with pytest.raises(UserError, match="ends too early"):
            list(pieces)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_pieces_reach_a_gpu_whole(saved, small_stage):
    held, stored = saved
    target = torch.empty(23, 7, device="cuda", dtype=torch.bfloat16)
    with TensorReader() as reader:
        reader.fill(target, stored["matrix"], first=0, transposed=False)
    assert torch.equal(target.cpu(), held["matrix"].bfloat16())
