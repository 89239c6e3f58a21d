"""Exports of a model. The words of `export --type` are here, so that the command line needs no torch."""

DTYPES = ("float32", "bfloat16", "float16")  # of merged weights
GGUF_TYPES = ("f32", "f16", "bf16", "q8_0", "q4_0")
K_TYPES = ("q4_K_M", "q5_K_M", "q6_K")  # of GGUF, too; llama-quantize writes them
