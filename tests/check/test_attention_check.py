"""The check of the attention kernel before the first step."""

import pytest
import torch
from plans_for_tests import tiny_config, tiny_plan
from runs_of_the_loop import CONFIG, Run

from bloomery.check.attention import check_attention
from bloomery.core.errors import UserError
from bloomery.model import native
from bloomery.model.attention import attend as attention
from bloomery.model.attention import compiled
from bloomery.model.native import library
from bloomery.train.failures import Unsound
from bloomery.train.kernels import build_kernels


def check_plan(plan) -> None:
    check_attention(plan.model, plan.train, sequence_length=plan.data.sequence_length)


def checked(backend: str, precision: str = "float32", **config) -> None:
    facts = tiny_config(**config)
    plan = tiny_plan(config=facts, model={"attention": backend}, train={"precision": precision})
    check_plan(plan)


OF_CPUS = [
    pytest.param(backend, marks=pytest.mark.cpu_only("its operator has no kernel for a device"))
    for backend in ("per_document", "compiled")
]


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "float16", "bfloat16-pure"])
@pytest.mark.parametrize("backend", ["mask", *OF_CPUS, "blockwise", "sdpa", "math"])
def test_a_sound_kernel_passes(backend, precision):
    checked(backend, precision)


def test_windows_and_soft_caps_are_part_of_it():
    checked("blockwise", attention_softcap=20.0)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda x: x * 1.2, "wrong results of mask attention"),
        (lambda x: x * torch.nan, "non-finite output"),
    ],
)
def test_a_kernel_that_computes_something_else_is_told(monkeypatch, change, said):
    sound = attention._BACKENDS["mask"]
    monkeypatch.setitem(attention._BACKENDS, "mask", lambda *inputs: change(sound(*inputs)))
    with pytest.raises(Unsound, match=said) as caught:
        checked("mask")
    assert "wrong results of mask attention in float32" in caught.value.problem
    assert "train.attention=blockwise" in caught.value.fix


def test_a_wrong_gradient_is_told(monkeypatch):
    sound = attention._BACKENDS["mask"]

    def wrong(q, k, v, layout, options):
        out = sound(q, k, v, layout, options)
        return out.detach() + (out - out.detach()) * 0.5

    monkeypatch.setitem(attention._BACKENDS, "mask", wrong)
    with pytest.raises(Unsound, match="wrong results of mask attention"):
        checked("mask")


def test_no_random_number_is_drawn():
    before = torch.get_rng_state()
    check_plan(tiny_plan(config=CONFIG))
    assert torch.equal(torch.get_rng_state(), before)


def test_a_run_does_not_begin_on_a_wrong_kernel(prepared, tmp_path, monkeypatch):
    sound = attention._BACKENDS["mask"]
    monkeypatch.setitem(attention._BACKENDS, "mask", lambda *inputs: sound(*inputs) + 1)
    with pytest.raises(Unsound):
        Run(tiny_plan(prepared, config=CONFIG, train={"steps": 1}), tmp_path / "run")
    assert not (tmp_path / "run/checkpoints").exists()


def test_a_plan_with_compiled_attention_does_not_run_without_a_compiler(monkeypatch):
    monkeypatch.setattr(native, "find_compiler", lambda: None)
    for cached in (library, compiled._code):
        cached.cache_clear()
    try:
        with pytest.raises(UserError, match="no C\\+\\+ compiler") as caught:
            build_kernels(tiny_plan(model={"attention": "compiled"}).model)
    finally:
        for cached in (library, compiled._code):
            cached.cache_clear()
    assert "per_document" in caught.value.fix
