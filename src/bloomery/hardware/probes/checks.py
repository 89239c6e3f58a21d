"""What probes share: values against float64, times as the best of several. Torch is imported inside functions."""

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

Found = dict[str, Any]  # fields of a Probe: outcome, said, seconds, error, facts
Attend = Callable[["Tensor", "Tensor", "Tensor"], "Tensor"]

# Greatest difference that rounding explains, as a share of the largest value. Half precision: MI200 rounds the factors
# of fp16's backward to bf16, and sums may be kept in the type itself.
TOLERANCE = {"float32": 2e-5, "float16": 2e-2, "bfloat16": 4e-2}
REPEATS, TIMING_SECONDS = 5, 1.0


def backward(result: "Tensor", gradient: "Tensor") -> None:
    result.backward(gradient)


def judged(error: float, dtype: str, **fields: Any) -> Found:
    """Wrong when the values differ by more than rounding, or are no numbers."""
    limit = TOLERANCE[dtype]
    if error <= limit:
        return {"outcome": "ok", "error": error} | fields
    said = f"differs from float64 by {error:.2g} of the largest value; rounding explains {limit:.2g}"
    return {"outcome": "wrong", "error": error if error == error else None, "said": said} | fields


def difference(found: "Tensor", reference: "Tensor") -> float:
    """The greatest difference as a share of the reference's largest value; NaN when a value is none."""
    return float((found.double().cpu() - reference).abs().max() / reference.abs().max().clamp(min=1e-30))


def worst(errors: list[float]) -> float:
    """The largest; NaN, which compares with nothing, counts as larger than any."""
    return next((error for error in errors if error != error), max(errors))


def best_seconds(work: Callable[[], object], device: str) -> float:
    """Of several runs after a first one that warms up."""
    import torch

    def wait() -> None:
        if device.startswith("cuda"):
            torch.cuda.synchronize(device)

    work()
    wait()
    times: list[float] = []
    begun = time.perf_counter()
    while len(times) < REPEATS and (not times or time.perf_counter() - begun < TIMING_SECONDS):
        start = time.perf_counter()
        work()
        wait()
        times.append(time.perf_counter() - start)
    return min(times)


def product(where: str, dtype: str, *, sizes: tuple[int, int, int]) -> Found:
    """a b and both gradients against float64 on the CPU, from normal values."""
    import torch

    rows, inner, columns = sizes
    kind = getattr(torch, dtype)
    torch.manual_seed(0)
    a, b, g = torch.randn(rows, inner), torch.randn(inner, columns), torch.randn(rows, columns)
    a, b, g = (tensor.to(kind) for tensor in (a, b, g))
    left, right = (tensor.to(where).requires_grad_() for tensor in (a, b))
    result = left @ right
    backward(result, g.to(where))
    assert left.grad is not None and right.grad is not None
    exact = a.double() @ b.double(), g.double() @ b.double().T, a.double().T @ g.double()
    errors = [difference(x.detach(), y) for x, y in zip((result, left.grad, right.grad), exact, strict=True)]
    return judged(worst(errors), dtype)


def product_seconds(where: str, dtype: str, size: int) -> float:
    """Of a square product with both gradients."""
    import torch

    a, b = (torch.randn(size, size).to(where, getattr(torch, dtype)).requires_grad_() for _ in range(2))
    gradient = torch.randn(size, size).to(where, getattr(torch, dtype))

    def work() -> None:
        a.grad = b.grad = None
        backward((a @ b), gradient)

    return best_seconds(work, where)


def attention_checked(run: Attend, where: str, dtype: str, *, tokens: int) -> Found:
    """Causal attention of 2 rows, 4 heads, width 64 and its three gradients against float64 on the CPU."""
    import torch

    torch.manual_seed(0)
    q, k, v, g = (torch.randn(2, 4, tokens, 64).to(getattr(torch, dtype)) for _ in range(4))
    exact = [tensor.double().requires_grad_() for tensor in (q, k, v)]
    seen = torch.ones(tokens, tokens, dtype=torch.bool).tril()
    scores = (exact[0] @ exact[1].mT / 8.0).masked_fill(~seen, float("-inf"))
    reference = torch.softmax(scores, -1) @ exact[2]
    backward(reference, g.double())
    inputs = [tensor.to(where).requires_grad_() for tensor in (q, k, v)]
    result = run(*inputs)
    backward(result, g.to(where))
    pairs = [(result.detach(), reference.detach())]
    pairs += [(x.grad, y.grad) for x, y in zip(inputs, exact, strict=True) if x.grad is not None and y.grad is not None]
    assert len(pairs) == 4
    return judged(worst([difference(found, truth) for found, truth in pairs]), dtype)


def attention_seconds(run: Attend, where: str, dtype: str, *, tokens: int) -> float:
    """Forward and backward of one row, 8 heads, width 64."""
    import torch

    q, k, v = (torch.randn(1, 8, tokens, 64).to(where, getattr(torch, dtype)).requires_grad_() for _ in range(3))
    gradient = torch.randn(1, 8, tokens, 64).to(where, getattr(torch, dtype))

    def work() -> None:
        q.grad = k.grad = v.grad = None
        backward(run(q, k, v), gradient)

    return best_seconds(work, where)
