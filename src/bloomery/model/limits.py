"""How much the runtime works on at once: the code obeys these numbers and a plan counts with them. No torch.

Those of optimizers are here too, because a plan is made below training. Quantized weights have theirs in
`quantization/sizes.py`.
"""

# Entries of the vocabulary whose logits exist at once on a CPU: a thousand rows of them stay in the caches, so that the
# passes between the matmuls cost little, and computing them twice is quicker than reading all 50,000 from memory.
CPU_TILE = 4096
ATTENTION_BLOCK = 256  # queries and keys of a tile of blockwise attention
CPU_SCORES, GPU_SCORES = 2**20, 2**23  # of such tiles that exist at once: a cache's worth, or enough to fill a GPU
# Numbers that an optimizer of our own works on at once: 16 million (64 MiB of float32) keep a device busy, 128 thousand
# stay in a core's cache.
GPU_PIECE, CPU_PIECE = 2**24, 2**17
INT8_BLOCK = 256  # numbers of a state that share a scale: arXiv:2110.02861 takes 2048, bitsandbytes 256 today
INT8_SMALLEST = 4096  # tensors of fewer numbers keep float32 moments, as in bitsandbytes: they decide much
MUON_STACK = 2**24  # numbers of matrices orthogonalized at once: enough to fill a device, 100 MiB of scratch at most
