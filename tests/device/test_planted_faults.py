"""What the simulated device must notice: one small mistake after the other, each beside the same work done right."""

import gc
import itertools
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest
import simulated
import torch

DEVICE = torch.device("cuda")
COUNT = 1 << 16
HIP = torch.version.hip is not None


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    torch.cuda.synchronize()
    simulated.clear()
    yield
    simulated.mend()
    torch.cuda.synchronize()
    simulated.clear()


def values(number: float = 0.0, count: int = COUNT) -> torch.Tensor:
    return torch.full((count,), number, device=DEVICE)


# Memory and devices


def child(code: str) -> subprocess.CompletedProcess[str]:
    """A process that makes a mistake, which is not reported as one of this test."""
    limited = "import resource; resource.setrlimit(resource.RLIMIT_CORE, (0, 0)); import torch, ctypes, os\n"
    return subprocess.run(
        [sys.executable, "-c", limited + code],
        env=os.environ | {"BLOOMERY_SIMULATED_REPORTS": ""},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_a_host_that_touches_device_memory_is_killed() -> None:
    ended = child(
        "x = torch.ones(8, device='cuda')\nprint(float(x.sum()), flush=True)\nctypes.string_at(x.data_ptr(), 4)"
    )
    assert ended.stdout == "8.0\n"
    assert ended.returncode == -signal.SIGSEGV


def test_a_forked_child_may_free_but_not_use_the_devices_of_its_parent() -> None:
    ended = child(
        """
x = torch.ones(1 << 22, device='cuda')
y = torch.ones(8)
if (pid := os.fork()) == 0:
    del x
    try:
        torch.zeros(8, device='cuda')
    except RuntimeError as error:
        print(str(error).splitlines()[0], flush=True)
    try:
        y.to('cuda')
    except RuntimeError as error:
        print(str(error).splitlines()[0], flush=True)
    os._exit(0)
os.waitpid(pid, 0)
print(float(x.sum()))
"""
    )
    lines = ended.stdout.splitlines()
    assert len(lines) == 3, ended.stderr
    assert all("fork" in line for line in lines[:2])
    assert lines[2] == str(float(1 << 22))


@pytest.mark.parametrize("other", ["cpu", "cuda:1"])
def test_a_tensor_of_another_device(other: str) -> None:
    """PyTorch itself looks at those of an elementwise operator; at those of a product its kernel does."""
    square = torch.ones(8, 8, device=other)
    torch.cuda.synchronize(1)
    ones = values(1, count=64).view(8, 8)
    for work in (lambda: ones + square, lambda: ones @ square):
        with pytest.raises(RuntimeError, match=f"same device.*cuda:0 and {other}"):
            work()
    assert (values() + torch.tensor(1.0)).device.index == 0, "a number of the host may be anywhere"


@pytest.mark.parametrize("other", ["cpu", "cuda:1"])
def test_a_generator_of_another_device(other: str) -> None:
    with pytest.raises(RuntimeError, match="generator"):
        values().normal_(generator=torch.Generator(other))
    values().normal_(generator=torch.Generator("cuda:0"))


def test_an_allocation_on_the_wrong_device_shows_there() -> None:
    torch.cuda.set_device(1)
    try:
        before = [simulated.stats(device).total for device in (0, 1)]
        right = torch.zeros(8, device="cuda")
        wrong = torch.zeros(8, device="cuda:0")
        assert (right.device.index, wrong.device.index) == (1, 0)
        allocations = [simulated.stats(device).total - before[device] for device in (0, 1)]
        assert allocations == [1, 1]
    finally:
        torch.cuda.set_device(0)


def test_a_kernel_on_another_device_than_its_tensors() -> None:
    x = values()
    simulated.launch("its own", reads=[x], writes=[x])
    torch.cuda.synchronize()
    with torch.cuda.device(1):
        simulated.launch("another's", writes=[x])
        with pytest.raises(torch.AcceleratorError, match="an illegal memory access"):
            torch.cuda.synchronize()


def test_out_of_memory_reads_as_the_vendors() -> None:
    """Texts of issues of PyTorch and ROCm; the first of them is what `train.recover` reads the size from."""
    torch.cuda.set_per_process_memory_fraction(1.0, 0)  # else PyTorch's text names the share, too
    total = torch.cuda.get_device_properties(0).total_memory
    with pytest.raises(torch.OutOfMemoryError) as told:
        torch.empty(total, dtype=torch.uint8, device=DEVICE).new_empty(total)
    used = "" if HIP else r"Including non-PyTorch memory, this process has \d.* memory in use. "
    assert re.match(
        rf"{'HIP' if HIP else 'CUDA'} out of memory. Tried to allocate {total / 2**30:.2f} GiB. GPU 0 has a total "
        rf"capacity of {total / 2**30:.2f} GiB of which .* is free. {used}Of the allocated memory",
        str(told.value),
    )


def test_memory_above_the_plan() -> None:
    planned = torch.cuda.memory_allocated() + 3 * 4 * COUNT
    torch.cuda.reset_peak_memory_stats()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(planned / total, 0)
    try:
        kept = [values() for _ in range(2)]
        values() + 0  # one more, and its result
    except torch.OutOfMemoryError:
        pass
    else:
        pytest.fail("it took more than its part")
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, 0)
    assert torch.cuda.max_memory_allocated() <= planned
    del kept


# Copies that do not block


def test_the_host_reads_before_a_copy_has_arrived() -> None:
    host = torch.empty(COUNT, pin_memory=True)
    host.copy_(values(3), non_blocking=True)
    values().add_(1)  # other work of the stream does not bring it sooner
    assert host.isnan().all()
    torch.cuda.synchronize()
    assert host.eq(3).all()


def test_the_host_writes_before_a_copy_has_arrived() -> None:
    host = torch.empty(COUNT, pin_memory=True)
    host.copy_(values(3), non_blocking=True)
    host.zero_()
    with pytest.raises(RuntimeError, match="the host wrote pinned memory"):
        torch.cuda.synchronize()


def test_the_host_reuses_pinned_memory_before_it_left() -> None:
    host = torch.ones(COUNT).pin_memory()
    device = host.to(DEVICE, non_blocking=True)
    device.add_(1)  # the copy has arrived for the device, and nobody told the host
    host.zero_()
    with pytest.raises(RuntimeError, match="pinned memory was written"):
        torch.cuda.synchronize()
    assert device.eq(2).all()


def test_pinned_memory_that_is_freed_serves_nobody_before_its_copy_is_over() -> None:
    device = torch.ones(COUNT).pin_memory().to(DEVICE, non_blocking=True)
    other = torch.zeros(COUNT, pin_memory=True)  # would be its memory
    torch.cuda.synchronize()
    assert device.eq(1).all()
    assert other.eq(0).all()


def test_pinned_memory_goes_out_and_comes_back_in_order() -> None:
    """Copies of one stream that use the same pinned memory need no wait of the host between them."""
    host = torch.empty(COUNT, pin_memory=True)
    first, second = values(1), values(2)
    host.copy_(first, non_blocking=True)
    back = host.to(DEVICE, non_blocking=True)
    host.copy_(second, non_blocking=True)
    torch.cuda.synchronize()
    assert back.eq(1).all()
    assert host.eq(2).all()


def test_two_streams_on_the_same_pinned_memory() -> None:
    host, side = torch.empty(COUNT, pin_memory=True), torch.cuda.Stream()
    host.copy_(values(1), non_blocking=True)
    with (
        pytest.raises(RuntimeError, match="race: a copy reads pinned memory"),
        torch.cuda.stream(side),
    ):
        host.to(DEVICE, non_blocking=True)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        back = host.to(DEVICE, non_blocking=True)
    torch.cuda.synchronize()
    assert back.eq(1).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_transposed", [False, True])
def test_copies_of_any_layout_and_dtype_arrive(dtype: torch.dtype, is_transposed: bool) -> None:
    source = torch.arange(64.0).view(4, 16).pin_memory()
    device = torch.empty(16, 4, dtype=dtype, device=DEVICE)
    if is_transposed:
        source = source.t()
    else:
        device = device.view(4, 16)
    device.copy_(source, non_blocking=True)
    host = torch.empty(source.shape, pin_memory=True).copy_(device, non_blocking=True)
    torch.cuda.synchronize()
    assert host.equal(source)


# Streams


def on_side_stream(work: Callable[[torch.Tensor], object], *, waits: bool) -> torch.Tensor:
    """`work` on a tensor, on a stream that waits for it or does not."""
    side, x = torch.cuda.Stream(), values()
    if waits:
        side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        work(x)
    torch.cuda.current_stream().wait_stream(side)
    return x


@pytest.mark.parametrize(
    "work",
    [lambda x: x.add_(1), lambda x: x + 1, lambda x: x[: COUNT // 2].fill_(1)],
    ids=["written", "read", "written in part"],
)
def test_a_stream_that_does_not_wait(work: Callable[[torch.Tensor], object]) -> None:
    on_side_stream(work, waits=True)
    with pytest.raises(
        RuntimeError, match=r"race: aten::\w+ (reads|writes) what another stream wrote"
    ):
        on_side_stream(work, waits=False)


def test_streams_may_use_parts_of_a_tensor_side_by_side() -> None:
    x, side = values(), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        x[COUNT // 2 :].add_(1)
    x[: COUNT // 2].add_(1)
    with pytest.raises(RuntimeError, match="race"):
        x[COUNT // 2 - 1 :].add_(1)


def freed_while_used(*, recorded: bool) -> bool:
    """Whether the next tensor has the memory of one that a stream beside may still use."""
    side, x = torch.cuda.Stream(), values()
    address = x.data_ptr()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        x.add_(1)
    if recorded:
        x.record_stream(side)
    del x
    return values().data_ptr() == address


def test_memory_freed_while_another_stream_uses_it() -> None:
    assert not freed_while_used(recorded=True)
    torch.cuda.synchronize()
    with pytest.raises(
        RuntimeError, match="memory of a freed tensor that another stream still uses"
    ):
        freed_while_used(recorded=False)


def test_memory_that_was_recorded_returns_after_a_wait() -> None:
    side, x = torch.cuda.Stream(), values()
    address = x.data_ptr()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        x.add_(1)
    x.record_stream(side)
    del x
    side.synchronize()
    assert address in {values().data_ptr()}


def test_a_streams_memory_is_not_another_streams() -> None:
    """A freed block stays with the stream that allocated it, so that no other has to wait for what used it."""
    side, x = torch.cuda.Stream(), values()
    address = x.data_ptr()
    del x
    with torch.cuda.stream(side):
        assert values().data_ptr() != address


def test_a_race_is_traced_to_its_places() -> None:
    simulated.trace(True)
    try:
        with pytest.raises(
            RuntimeError, match=r"aten::add at backward reads .*\(aten::fill_ at backward"
        ):
            on_side_stream(lambda x: x.add_(1), waits=False)
    finally:
        simulated.trace(False)


# Other orders of recorded work


def wrong_orders(*, waits: bool) -> list[str]:
    """Of a buffer that a copy overwrites after it was read, what the first work with other bytes was."""
    home, buffer, side = torch.ones(COUNT).pin_memory(), values(2), torch.cuda.Stream()
    simulated.record()
    total = buffer.sum()
    if waits:
        side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        buffer.copy_(home, non_blocking=True)
    torch.cuda.current_stream().wait_stream(side)
    buffer.add_(total)
    torch.cuda.synchronize()
    assert buffer.eq(2 * COUNT + 1).all(), "in the recording the copy comes late"
    orders = [simulated.replay(seed) for seed in range(20)]
    assert buffer.eq(2 * COUNT + 1).all(), "afterwards memory is as it was"
    return orders


def test_orders_that_nothing_forbids_are_tried() -> None:
    assert set(wrong_orders(waits=True)) == {""}
    simulated.problem_is_error(False)
    try:
        orders = wrong_orders(waits=False)
    finally:
        simulated.problem_is_error(True)
    assert 0 < orders.count("") < 20
    assert {order.split(",")[0] for order in orders} == {"", "aten::sum"}


# Events


def test_an_event_is_not_over_before_the_host_knows() -> None:
    event = torch.cuda.Event()
    values().add_(1)
    event.record()
    assert [event.query(), event.query()] == [False, True], "who asks until it is over goes on"


def test_times_of_events_need_a_wait() -> None:
    from bloomery.core.device import recorded_event

    begin = recorded_event(DEVICE)
    values().add_(1)
    end = recorded_event(DEVICE)
    with pytest.raises(RuntimeError, match="must be completed"):
        begin.elapsed_time(end)
    end.synchronize()
    assert 0 <= begin.elapsed_time(end) < 10_000


# Waits


def test_waits_are_counted_and_can_be_errors() -> None:
    x = values(1)
    assert float(x.sum()) == COUNT
    x.nonzero()
    x[x > 0] = 0.0  # one number: no indices
    torch.ones(3).to(DEVICE)
    torch.ones(3).pin_memory().to(DEVICE, non_blocking=True)  # none
    torch.cuda.synchronize()
    waits = {
        "item": 1,
        "aten::nonzero": 1,
        "copy to the device": 1,
        "synchronize": 1,
    }
    assert simulated.report()["sync"] == waits
    torch.cuda.set_sync_debug_mode("error")
    try:
        x.add_(1)
        torch.cuda.synchronize()  # asked for, no error: as PyTorch's mode has it
        with pytest.raises(RuntimeError, match="called a synchronizing CUDA operation"):
            x.sum().item()
    finally:
        torch.cuda.set_sync_debug_mode("default")


# Kernels


def test_an_operator_that_gives_wrong_values() -> None:
    simulated.faulty("aten::mm", 1.5)
    ones = torch.ones(2, 2, device=DEVICE)
    wrong = (ones @ ones).tolist()
    simulated.faulty("", 1.0)
    assert wrong == [[3, 3], [3, 3]]
    assert (ones @ ones).tolist() == [[2, 2], [2, 2]]


def test_an_error_of_a_kernel_surfaces_at_a_later_call() -> None:
    x = values(1)
    simulated.break_kernel("aten::mul")
    x.mul_(2)
    x.add_(1)
    with pytest.raises(torch.AcceleratorError) as told:
        x.sum().item()
    vendor = "HIP" if HIP else "CUDA"
    assert str(told.value).startswith(f"{vendor} error: an illegal memory access was encountered\n")
    for later in (lambda: x.add_(1), values, torch.cuda.synchronize, torch.cuda.Event().record):
        with pytest.raises(torch.AcceleratorError, match="illegal memory access"):
            later()
    torch.zeros(8, device="cuda:1").sum().item()  # the other device works


@pytest.mark.skipif(not HIP, reason="NVIDIA's runtime does not end the process")
def test_a_memory_fault_of_an_amd_gpu_ends_the_process() -> None:
    ended = child(
        """
import simulated
x = torch.ones(8, device='cuda')
simulated.break_kernel('aten::mul', kills=True)
x.mul_(2)
"""
    )
    assert ended.returncode == -signal.SIGABRT
    assert "Memory access fault by GPU node-1 " in ended.stderr


@pytest.mark.parametrize(
    "work",
    [
        lambda x: x.cumsum(0),
        lambda x: x.median(0),
        lambda x: x.histc(4),
        lambda x: x.put_(torch.tensor([0], device=DEVICE), torch.tensor([1.0], device=DEVICE)),
        lambda x: torch.bincount(torch.tensor([0, 1], device=DEVICE), weights=x[:2]),
        lambda x: x.scatter_reduce(0, torch.tensor([0], device=DEVICE), x[:1], "prod"),
        lambda x: (
            torch.nn.functional.interpolate(
                x.view(1, 1, -1).requires_grad_(), scale_factor=2, mode="linear"
            )
            .sum()
            .backward()
        ),
    ],
)
def test_an_operator_without_a_deterministic_kernel(work: Callable[[torch.Tensor], object]) -> None:
    work(values())
    torch.use_deterministic_algorithms(True)
    try:
        values().long().cumsum(0)
        values()[torch.tensor([0, 1], device=DEVICE)] = 1.0
        with pytest.raises(RuntimeError, match="deterministic implementation"):
            work(values())
    finally:
        torch.use_deterministic_algorithms(False)


# Attention


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("has_groups", [False, True])
def test_fused_attention_computes_what_the_cpus_does(dtype: torch.dtype, has_groups: bool) -> None:
    """And keeps no scores: T x T of them would be 8 MiB."""
    shapes = [(2, 4, 512, 16)] + [(2, 2 if has_groups else 4, 512, 16)] * 2
    results = []
    for device in ("cpu", "cuda"):
        torch.manual_seed(0)
        leaves = [torch.randn(shape).to(device, dtype).requires_grad_() for shape in shapes]
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
        out = torch.nn.functional.scaled_dot_product_attention(
            *leaves, is_causal=True, enable_gqa=has_groups
        )
        peak = torch.cuda.max_memory_allocated() - held
        out.float().square().sum().backward()
        results.append([out.detach().cpu(), *(leaf.grad.cpu() for leaf in leaves)])
    is_fused = dtype != torch.float32 or not has_groups  # the kernel for float32 has no groups
    assert (peak < 2 * 4 * 512 * 512 * dtype.itemsize) is is_fused
    tolerance = {torch.float32: 1e-4, torch.bfloat16: 3e-2}[dtype]
    for expected, got in zip(*results, strict=True):
        torch.testing.assert_close(got, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("window", [(-1, 0), (5, 0)])
def test_attention_over_documents_is_that_of_each(window: tuple[int, int]) -> None:
    from torch.nn.attention.varlen import varlen_attn

    borders, heads, width = [0, 7, 8, 31], 2, 8
    torch.manual_seed(0)
    leaves = [torch.randn(31, heads, width, device=DEVICE, requires_grad=True) for _ in range(3)]
    cu = torch.tensor(borders, dtype=torch.int32, device=DEVICE)
    got = varlen_attn(*leaves, cu, cu, 23, 23, window_size=window)
    got_grads = torch.autograd.grad(got.square().sum(), leaves)

    outs = []
    for begin, end in itertools.pairwise(borders):
        q, k, v = (leaf[begin:end].transpose(0, 1) for leaf in leaves)
        row = torch.arange(end - begin, device=DEVICE)
        seen = row[None] <= row[:, None]
        if window[0] >= 0:
            seen &= row[None] >= row[:, None] - window[0]
        scores = (q @ k.mT / width**0.5).masked_fill(~seen, float("-inf"))
        outs.append((scores.softmax(-1) @ v).transpose(0, 1))
    expected = torch.cat(outs)
    expected_grads = torch.autograd.grad(expected.square().sum(), leaves)
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-4)
    for mine, theirs in zip(got_grads, expected_grads, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=1e-4)


# The simulation itself


def test_blocks_of_all_sizes_keep_their_values() -> None:
    """Every tensor keeps what it holds, whatever is freed around it: no page of a neighbor is given away."""
    torch.manual_seed(0)
    sizes = [1, 127, 128, 1023, 4096, 65537, 1 << 20, (16 << 20) // 4 + 77, (16 << 20) // 4 + 1029]
    held: dict[int, torch.Tensor] = {}
    streams = [torch.cuda.current_stream(), torch.cuda.Stream()]
    for number in range(240):
        count = sizes[int(torch.randint(len(sizes) - (number % 4 > 0) * 2, ()))]
        with torch.cuda.stream(streams[number % 2]):
            held[number] = torch.full((count,), float(number), device=DEVICE)
        torch.cuda.synchronize()
        for gone in [key for key in held if int(torch.randint(3, ())) == 0]:
            del held[gone]
        if number % 50 == 49:
            torch.cuda.empty_cache()
        for key, tensor in held.items():
            assert tensor.eq(key).all(), (number, key)
    held.clear()
    gc.collect()
    torch.cuda.empty_cache()
    stats = simulated.stats()
    assert stats.reserved == stats.allocated


def test_memory_history_and_statistics_answer() -> None:
    torch.cuda.memory._record_memory_history()
    kept = values()
    segments = torch.cuda.memory._snapshot()["segments"]
    torch.cuda.memory._record_memory_history(enabled=None)
    in_use = sum(segment["allocated_size"] for segment in segments if segment["device"] == 0)
    assert in_use == torch.cuda.memory_allocated() >= kept.nbytes
    free, total = torch.cuda.mem_get_info()
    assert total - free == torch.cuda.memory_reserved()
    assert "PyTorch CUDA memory summary" in torch.cuda.memory_summary()
    with torch.profiler.profile() as profile:
        values().add_(1)
    assert any(event.name == "aten::add_" for event in profile.events())


def test_processes_have_it_forked_or_fresh(tmp_path: object) -> None:
    import preloaded

    code = (
        "import torch; print(torch.cuda.device_count(), torch.ones(3, device='cuda').sum().item())"
    )
    for popen in (subprocess.Popen, preloaded.Popen):
        process = popen(
            [sys.executable, "-c", code],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
            env=dict(os.environ),
        )
        assert process.communicate(timeout=120)[0] == f"{torch.cuda.device_count()} 3.0\n"
    assert process._ending is not None, "it was not forked"
