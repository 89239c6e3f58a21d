"""Edges of Triton's attention kernels, in Triton's interpreter. Run by test_attention_triton.py."""

import torch
from torch._subclasses import FakeTensorMode

from bloomery.model.attention.attend import attend, layout_of
from bloomery.model.attention.tile_times import Workload, launches
from bloomery.model.attention.tiles import tile_candidates
from bloomery.model.attention.triton_attention import decode

OPTIONS = {"window": None, "softcap": None, "scale": 0.125, "dropout": 0.0}


def attention(q, k, v, documents=None, backend="triton"):
    return attend(q, k, v, layout_of(documents, backend=backend), backend=backend, **OPTIONS)


def close(q, k, v, documents=None):
    """Output and gradients against plain attention in float64."""
    outputs = []
    for backend, dtype in (("triton", torch.float32), ("math", torch.float64)):
        leaves = [x.detach().to(dtype).requires_grad_() for x in (q, k, v)]
        out = attention(*leaves, documents, backend)
        # Numbers of size 1: those of a square's gradient are sums of hundreds here, and round as such.
        out.backward(torch.arange(out.numel()).cos().view(out.shape).to(dtype))
        outputs.append([out.detach(), *(leaf.grad for leaf in leaves)])
    for ours, plain in zip(*outputs, strict=True):
        assert ours.shape == plain.shape
        torch.testing.assert_close(ours.double(), plain, atol=2e-5, rtol=1e-4)


torch.manual_seed(0)
torch.set_num_threads(1)
base = torch.randn(2, 64, 4, 33).permute(0, 2, 3, 1)  # the numbers of a head are 132 apart
close(base, base[:, :2], base[:, 2:])
wide = torch.randn(2, 33, 4, 200)[..., 3:67].transpose(1, 2)  # neighbors, at an odd address
close(wide, wide[:, :2], wide[:, 2:])
close(torch.randn(1, 2, 1, 64), torch.randn(1, 2, 1, 64), torch.randn(1, 2, 1, 64))

# Documents of one token each, and padding, which is a document of its own.
lonely = torch.arange(20)[None]
close(torch.randn(1, 2, 20, 64), torch.randn(1, 1, 20, 64), torch.randn(1, 1, 20, 64), lonely)
padded = torch.tensor([[0] * 7 + [1] * 5 + [-1] * 8])
close(torch.randn(1, 2, 20, 64), torch.randn(1, 1, 20, 64), torch.randn(1, 1, 20, 64), padded)

for batch, length in ((0, 5), (2, 0)):
    empty = torch.randn(batch, 2, length, 64, requires_grad=True)
    out = attention(empty, empty, empty)
    out.sum().backward()
    assert out.shape == empty.shape == empty.grad.shape

# The launches that a GPU times are whole: a failure there would leave the table's first tile, unnoticed.
for packed, dropout, softcap in ((True, 0.1, None), (False, 0.0, 4.0)):
    workload = Workload(4, 2, 64, 20, torch.float32, packed, softcap, dropout)
    for launch in launches(workload, torch.device("cpu")):
        for tile in tile_candidates(launch.kernel, arch="gfx1030", width=64):
            launch.run(tile)

# A simulated step and torch.compile see shapes alone, as a projection leaves them.
with FakeTensorMode():
    q = torch.empty(2, 7, 4, 64, dtype=torch.float16).transpose(1, 2).requires_grad_()
    k = torch.empty(2, 7, 2, 64, dtype=torch.float16).transpose(1, 2).requires_grad_()
    out = attention(q, k, k)
    assert (out.shape, out.dtype, out.stride()) == (q.shape, q.dtype, q.stride())
    out.sum().backward()
    assert (q.grad.shape, k.grad.shape) == (q.shape, k.shape)
    token = torch.empty(2, 1, 4, 64, dtype=torch.float16).transpose(1, 2)
    out = decode(token, k.detach(), k.detach(), None, None, 0.125)
    assert (out.shape, out.dtype) == (token.shape, token.dtype)
