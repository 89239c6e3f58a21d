"""Compiled AdamW gives the bits of the same update in PyTorch, and is used where it does."""

from ctypes import POINTER, c_int16, cast

import pytest
import torch
from test_adamw import PLAN, Some, same
from torch import Tensor, nn

from bloomery.facts.limits import INT8_BLOCK
from bloomery.model import native
from bloomery.train.optim import adamw, compiled_adamw
from bloomery.train.optim import common as optim_pieces
from bloomery.train.optim.adamw import ChunkedAdamW, compiled_code_agrees
from bloomery.train.optim.build import build_optimizer
from bloomery.train.optim.common import Gate, Rounding, compiled_rounding_agrees, random_bits
from bloomery.train.optim.placement import StatePlacement

pytestmark = pytest.mark.skipif(native.find_compiler() is None, reason="no C++ compiler")
STATES = ["float32", "bfloat16", "int8"]
HALF = torch.bfloat16


def optimizer_of(
    model: nn.Module, state_dtype: str, *, stochastic: bool, compiled: bool
) -> ChunkedAdamW:
    named = dict(model.named_parameters())
    rounding = Rounding({p: name for name, p in named.items()}, 3, stochastic=stochastic)
    decayed = [p for p in named.values() if p.ndim > 1]
    others = [p for p in named.values() if p.ndim < 2]
    return ChunkedAdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}],
        lr=0.01,
        betas=(0.9, 0.95),
        eps=1e-8,
        state_dtype=state_dtype,
        rounding=rounding,
        placement=StatePlacement(offload=False),
        compiled=compiled,
    )


def give(model: nn.Module, step: int) -> None:
    """Gradients over 30 decades, some of them zero."""
    generator = torch.Generator().manual_seed(step)
    for parameter in model.parameters():
        decades = torch.randint(-24, 6, parameter.shape, generator=generator)
        gradient = torch.randn(parameter.shape, generator=generator) * 10.0**decades
        parameter.grad = gradient.to(parameter.dtype)
        parameter.grad.view(-1)[::7] = 0
        parameter.grad.view(-1)[:INT8_BLOCK] = 0


def states_of(model: nn.Module, optimizer: ChunkedAdamW) -> list[Tensor]:
    return [value for p in model.parameters() for value in optimizer.state[p].values()]


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("state_dtype", STATES)
@pytest.mark.parametrize(
    ("dtype", "stochastic"), [(torch.float32, False), (HALF, False), (HALF, True)]
)
def test_the_bits_are_those_of_pytorchs_operations(
    monkeypatch: pytest.MonkeyPatch,
    dtype: torch.dtype,
    stochastic: bool,
    state_dtype: str,
    gated: bool,
) -> None:
    monkeypatch.setattr(optim_pieces, "CPU_PIECE", 1024)  # several pieces of a matrix
    mine, theirs = Some(dtype), Some(dtype)
    ours, torchs = (
        optimizer_of(model, state_dtype, stochastic=stochastic, compiled=compiled)
        for model, compiled in ((mine, True), (theirs, False))
    )
    for step in range(6):
        is_open = float(step != 3)
        gate = Gate(torch.tensor(is_open), torch.tensor(0.3)) if gated else None
        for model, optimizer in ((mine, ours), (theirs, torchs)):
            give(model, step)
            optimizer.step(gate=gate)
    assert same(mine, theirs)
    for state, expected in zip(states_of(mine, ours), states_of(theirs, torchs), strict=True):
        assert torch.equal(state, expected)


@pytest.mark.parametrize("state_dtype", STATES)
@pytest.mark.parametrize("dtype", [torch.float32, HALF])
def test_clipping_needs_no_pass_of_its_own(dtype: torch.dtype, state_dtype: str) -> None:
    """The bits are those of gradients that were scaled in place, which rounds them to their dtype."""
    mine, theirs = Some(dtype), Some(dtype)
    ours, torchs = (
        optimizer_of(model, state_dtype, stochastic=dtype == HALF, compiled=compiled)
        for model, compiled in ((mine, True), (theirs, False))
    )
    for step in range(3):
        give(mine, step)
        give(theirs, step)
        before = [parameter.grad.clone() for parameter in mine.parameters()]
        ours.step_scaled(0.3)
        torchs.step_scaled(0.3)
        for parameter, other, old in zip(
            mine.parameters(), theirs.parameters(), before, strict=True
        ):
            assert torch.equal(parameter.grad, old)
            assert not torch.equal(other.grad, old) or not old.any()  # that one is scaled
    assert same(mine, theirs)
    for state, expected in zip(states_of(mine, ours), states_of(theirs, torchs), strict=True):
        assert torch.equal(state, expected)


@pytest.mark.parametrize("count", [1, 16, 1247, 5000])
def test_random_bits_are_those_of_pytorchs_generator(count: int) -> None:
    seed = 2**62 + 12345
    bits = torch.zeros(count + 1, dtype=torch.int16)
    address = cast(bits.data_ptr(), POINTER(c_int16))
    compiled_adamw._code().random_bits(seed & 0xFFFFFFFF, address, count)
    assert torch.equal(bits[:-1], random_bits(count, seed=seed, device=torch.device("cpu")))
    assert bits[-1] == 0


@pytest.mark.parametrize("kind", ["adafactor", "muon", "adamw"])
def test_every_optimizer_rounds_at_random_by_compiled_code(
    monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """To the bits of PyTorch's operations."""
    monkeypatch.setattr(optim_pieces, "CPU_PIECE", 1024)
    settings = {"kind": kind, "state_dtype": "float32", "stochastic_rounding": True}
    models = []
    for agrees in (True, False):
        monkeypatch.setattr(optim_pieces, "compiled_rounding_agrees", lambda agrees=agrees: agrees)
        monkeypatch.setattr(adamw, "compiled_code_agrees", lambda: False)
        model = Some(HALF)
        optimizer = build_optimizer(model, PLAN.model_copy(update=settings), seed=3)
        for step in range(3):
            give(model, step)
            optimizer.step(1.0)
        models.append(model)
    assert same(*models)


def test_numbers_that_are_not_finite_stay_so() -> None:
    exact = torch.full((4000,), float("nan"))
    exact[1::3] = float("inf")
    exact[2::3] = -float("inf")
    rounded = compiled_adamw.rounded_at_random(exact, seed=5)
    assert bool((rounded[2::3] == -float("inf")).all())
    assert bool((rounded[0::3] == float("inf")).all()) and bool((rounded[1::3] > 0).all())
    assert compiled_rounding_agrees()


def test_seeds_of_pieces_are_those_of_each() -> None:
    parameter = nn.Parameter(torch.zeros(1))
    rounding = Rounding({parameter: "layers.0.weight"}, 7, stochastic=True)
    for slot in ((), ("exp_avg",)):
        seeds = rounding.seeds_of_pieces(parameter, 12, range(0, 5000, 1024), *slot)
        assert seeds == [
            rounding.seed_of(parameter, 12, start, *slot) for start in range(0, 5000, 1024)
        ]


def test_threads_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optim_pieces, "CPU_PIECE", 1024)
    threads = torch.get_num_threads()
    models = [Some(HALF) for _ in range(2)]
    try:
        for count, model in enumerate(models, start=1):
            torch.set_num_threads(count)
            optimizer = optimizer_of(model, "int8", stochastic=True, compiled=True)
            give(model, 0)
            optimizer.step()
    finally:
        torch.set_num_threads(threads)
    assert same(*models)


@pytest.fixture
def _asked_anew() -> None:
    """As in a process that has not asked for the code yet."""
    caches = (
        native.library,
        compiled_adamw._code,
        compiled_code_agrees,
        compiled_rounding_agrees,
    )
    for function in caches:
        function.cache_clear()
    yield
    for function in caches:
        function.cache_clear()


def calls_of_compiled_code(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Of an update by the optimizer that a plan builds; the number of values of each call."""
    counts: list[int] = []
    update = compiled_adamw.update

    def noted(weights: Tensor, *args: object, **kwargs: object) -> None:
        counts.append(weights.numel())
        update(weights, *args, **kwargs)

    monkeypatch.setattr(adamw.compiled_adamw, "update", noted)
    model = Some(HALF)
    plan = PLAN.model_copy(update={"state_dtype": "int8", "stochastic_rounding": True})
    optimizer = build_optimizer(model, plan)
    give(model, 0)
    optimizer.step(1.0)
    sizes = {parameter.numel() for parameter in model.parameters()}
    return [count for count in counts if count in sizes]


@pytest.mark.usefixtures("_asked_anew")
def test_ordinary_training_on_a_cpu_updates_by_compiled_code(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert sorted(calls_of_compiled_code(monkeypatch)) == sorted(
        p.numel() for p in Some().parameters()
    )


@pytest.mark.usefixtures("_asked_anew")
def test_without_a_compiler_pytorch_updates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "find_compiler", lambda: None)
    assert calls_of_compiled_code(monkeypatch) == []


@pytest.mark.usefixtures("_asked_anew")
def test_code_that_gives_other_bits_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where PyTorch has no fused multiply-add, or draws other bits."""
    update = compiled_adamw.update

    def off(weights: Tensor, *args: object, **kwargs: object) -> None:
        update(weights, *args, **kwargs)
        weights[0] = torch.nextafter(weights[0], weights[0] + 1)

    monkeypatch.setattr(adamw.compiled_adamw, "update", off)
    assert not compiled_code_agrees()
    assert calls_of_compiled_code(monkeypatch) == []


@pytest.mark.soak
@pytest.mark.usefixtures("_asked_anew")
def test_a_cpu_without_avx512_computes_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    if "avx2" not in native._cpu():
        pytest.skip("this CPU has no AVX2")
    monkeypatch.setattr(native, "FLAGS", (*native.FLAGS, "-march=haswell"))
    assert compiled_code_agrees()
