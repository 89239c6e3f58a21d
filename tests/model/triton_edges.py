"""Edges of Triton's attention kernels, in Triton's interpreter. Run by test_attention_triton.py."""

import torch
from torch._subclasses import FakeTensorMode

from bloomery.model.attention import triton_attention
from bloomery.model.attention.attend import attend, layout_of
from bloomery.model.attention.tile_times import Workload, launches
from bloomery.model.attention.tiles import tile_candidates
from bloomery.model.attention.triton_attention import KernelFailed, decode
from bloomery.train.process import out_of_memory

OPTIONS = {"window": None, "softcap": None, "scale": 0.125, "dropout": 0.0}


def attention(q, k, v, documents=None, backend="triton", **options):
    layout = layout_of(documents, backend=backend)
    return attend(q, k, v, layout, backend=backend, **OPTIONS | options)


def waves(output):
    """Numbers of size 1: those of a square's gradient are sums of hundreds here, and round as such."""
    return torch.arange(output.numel()).cos().view(output.shape)


def assert_close_to_math(q, k, v, documents=None, d_out=waves, **options):
    """Output and gradients against plain attention in float64. `d_out`: of an output, the gradient."""
    outputs = []
    for backend, dtype in (("triton", torch.float32), ("math", torch.float64)):
        # The kernels get the tensor itself: a copy would have strides of its own.
        leaves = [tensor.detach().to(dtype).requires_grad_() for tensor in (q, k, v)]
        output = attention(*leaves, documents, backend, **options)
        output.backward(d_out(output).to(dtype))
        outputs.append([output.detach(), *(leaf.grad for leaf in leaves)])
    for result, exact_result in zip(*outputs, strict=True):
        assert result.shape == exact_result.shape
        torch.testing.assert_close(result.double(), exact_result, atol=2e-5, rtol=1e-4)


torch.manual_seed(0)
torch.set_num_threads(1)
projections = torch.randn(2, 64, 3, 33).permute(0, 2, 3, 1)  # the numbers of a head are 99 apart
assert_close_to_math(projections[:, :2], projections[:, 1:2], projections[:, 2:])
wide = torch.randn(2, 33, 3, 200)[..., 3:67].transpose(1, 2)  # neighbors, at an odd address
assert_close_to_math(wide[:, :2], wide[:, 1:2], wide[:, 2:])
assert_close_to_math(torch.randn(1, 2, 1, 64), torch.randn(1, 2, 1, 64), torch.randn(1, 2, 1, 64))

# Documents of one token each, and padding, which is a document of its own.
single_tokens = torch.arange(20)[None]
assert_close_to_math(
    torch.randn(1, 2, 20, 64), torch.randn(1, 1, 20, 64), torch.randn(1, 1, 20, 64), single_tokens
)
padded_documents = torch.tensor([[0] * 7 + [1] * 5 + [-1] * 8])
assert_close_to_math(
    torch.randn(1, 2, 20, 64),
    torch.randn(1, 1, 20, 64),
    torch.randn(1, 1, 20, 64),
    padded_documents,
)

# Numbers that are not assigned, as those of documents without a token; and a row of padding alone.
gapped_documents = (torch.arange(20) // 6 * 5)[None]
assert_close_to_math(
    torch.randn(1, 2, 20, 64),
    torch.randn(1, 1, 20, 64),
    torch.randn(1, 1, 20, 64),
    gapped_documents,
)
padding_and_documents = torch.stack([torch.full((20,), -1), torch.arange(20) // 7])
assert_close_to_math(
    torch.randn(2, 2, 20, 64),
    torch.randn(2, 1, 20, 64),
    torch.randn(2, 1, 20, 64),
    padding_and_documents,
)

# Widths without a tile of their own; lengths around the edges of a tile, down to a single token.
for width in (1, 40, 72, 80, 96, 112, 200, 256):
    tokens = torch.randn(1, 4, 19, width)
    assert_close_to_math(tokens[:, :2], tokens[:, 2:3], tokens[:, 3:])
for length in (1, 2, 31, 32, 33):
    tokens = torch.randn(1, 3, length, 64)
    assert_close_to_math(tokens[:, :1], tokens[:, 1:2], tokens[:, 2:])
    thirds = (torch.arange(length) // 3)[None]
    assert_close_to_math(
        tokens[:, :1], tokens[:, 1:2], tokens[:, 2:], thirds, window=2, softcap=3.0
    )

# Tensors that repeat in memory: along heads, tokens, the numbers of a head, and all of them.
heads = torch.randn(1, 1, 19, 64)
assert_close_to_math(
    heads.expand(2, 4, 19, 64), heads.expand(2, 2, 19, 64), heads.expand(2, 2, 19, 64)
)
token = torch.randn(2, 2, 1, 64)
plain = torch.randn(2, 2, 19, 64)
assert_close_to_math(token.expand(2, 2, 19, 64), plain, token.expand(2, 2, 19, 64))
assert_close_to_math(torch.randn(2, 2, 19, 1).expand(2, 2, 19, 64), plain, plain)
assert_close_to_math(torch.tensor(0.3).expand(2, 2, 19, 64), plain, plain)

# Views: transposed, behind an offset, and at an address that is no multiple of 16 bytes.
transposed = torch.randn(2, 2, 64, 19).mT
assert_close_to_math(transposed, transposed, transposed)
offset_view = torch.randn(3, 2, 20, 64)[1:, :, 1:]
assert_close_to_math(offset_view, offset_view, offset_view)
unaligned_view = torch.randn(5000)[7 : 7 + 2 * 2 * 19 * 64].view(2, 2, 19, 64)
assert unaligned_view.data_ptr() % 16
assert_close_to_math(unaligned_view, unaligned_view, unaligned_view)

# Gradients as autograd leaves them: of a sum, of a mean over tokens, transposed, of every other number.
assert_close_to_math(plain, plain, plain, d_out=lambda output: torch.ones(()).expand(output.shape))
assert_close_to_math(plain, plain, plain, d_out=lambda output: token.expand(output.shape))
assert_close_to_math(plain, plain, plain, d_out=lambda output: waves(output).view(2, 2, 64, 19).mT)
assert_close_to_math(
    plain,
    plain,
    plain,
    d_out=lambda output: torch.stack([waves(output)] * 2, -1).flatten(3)[..., ::2],
)


def refusal(attend_to):
    try:
        attend_to()
    except RuntimeError as error:
        assert isinstance(error, KernelFailed), error
        return str(error)
    raise AssertionError("the kernels computed it")


# What they cannot compute they refuse by name, before any address is wrong.
wide_heads = torch.randn(1, 2, 5, 257)
assert "at most 256 numbers, not 257" in refusal(
    lambda: attention(wide_heads, wide_heads, wide_heads)
)
assert "not 257" in refusal(
    lambda: decode(wide_heads[:, :, :1], wide_heads, wide_heads, None, None, 0.125)
)
too_large_strides = torch.empty(0).as_strided((0, 2, 3, 64), (0, 64, 2**30, 1))
assert "3 tokens of 1,073,741,824 numbers" in refusal(
    lambda: triton_attention._heads(too_large_strides)
)
largest_strides = torch.empty(0).as_strided((0, 2, 3, 64), (0, 64, 2**30 - 64, 1))
assert triton_attention._heads(largest_strides)[3] == 2**30 - 64

# Out of memory in backward is no failure of a kernel, and the same step computes the same afterwards.
leaf = plain.clone().requires_grad_()
attention(leaf, leaf, leaf).sum().backward()
expected = leaf.grad
leaf.grad = None
empty_like = torch.empty_like


def raise_out_of_memory(*_):
    raise torch.OutOfMemoryError("HIP out of memory. Tried to allocate 2.50 GiB.")


torch.empty_like = raise_out_of_memory
try:
    attention(leaf, leaf, leaf).sum().backward()
    raise AssertionError("backward needs memory")
except torch.OutOfMemoryError as error:
    assert out_of_memory(error)
torch.empty_like = empty_like
leaf.grad = None
attention(leaf, leaf, leaf).sum().backward()
assert torch.equal(leaf.grad, expected)

for batch, length in ((0, 5), (2, 0)):
    empty_input = torch.randn(batch, 2, length, 64, requires_grad=True)
    output = attention(empty_input, empty_input, empty_input)
    output.sum().backward()
    assert output.shape == empty_input.shape == empty_input.grad.shape


# Decoding without texts, without keys, from views, and with as many heads as a repeated key head has.
def assert_decodes(q, k, counts):
    num_keys = None if counts is None else torch.tensor(counts, dtype=torch.int32)
    output = decode(q, k, k, num_keys, None, 0.125)
    assert output.shape == q.shape
    for row, count in enumerate(counts or [k.shape[2]] * len(q)):
        keys = k[row].double().repeat_interleave(q.shape[1] // k.shape[1], 0)[:, :count]
        exact_output = torch.softmax(q[row].double() @ keys.mT * 0.125, -1) @ keys
        torch.testing.assert_close(output[row].double(), exact_output, atol=2e-5, rtol=1e-4)


assert_decodes(torch.randn(0, 2, 1, 64), torch.randn(0, 1, 5, 64), None)
assert_decodes(torch.randn(2, 2, 1, 64), torch.randn(2, 1, 0, 64), None)
assert_decodes(torch.randn(1, 2, 1, 64), torch.randn(1, 1, 1, 64), None)
assert_decodes(token[:1].expand(3, 2, 1, 64), heads.expand(3, 1, 19, 64), [1, 3, 19])
assert_decodes(torch.randn(2, 2, 64, 1).mT, torch.randn(2, 1, 64, 300).mT, [300, 2])

# The launches that a GPU times are whole: a failure there would leave the table's first tile, unnoticed.
for packed, dropout, softcap in ((True, 0.1, None), (False, 0.0, 4.0)):
    workload = Workload(2, 1, 64, 20, torch.float32, packed, softcap, dropout)
    for launch in launches(workload, torch.device("cpu")):
        for tile in tile_candidates(launch.kernel, arch="gfx1030", width=64):
            launch.run(tile)

# A simulated step and torch.compile see shapes alone, as a projection leaves them.
with FakeTensorMode():
    q = torch.empty(2, 7, 4, 64, dtype=torch.float16).transpose(1, 2).requires_grad_()
    k = torch.empty(2, 7, 2, 64, dtype=torch.float16).transpose(1, 2).requires_grad_()
    output = attention(q, k, k)
    assert (output.shape, output.dtype, output.stride()) == (q.shape, q.dtype, q.stride())
    output.sum().backward()
    assert (q.grad.shape, k.grad.shape) == (q.shape, k.shape)
    token = torch.empty(2, 1, 4, 64, dtype=torch.float16).transpose(1, 2)
    output = decode(token, k.detach(), k.detach(), None, None, 0.125)
    assert (output.shape, output.dtype) == (token.shape, token.dtype)
