"""Names of quantized copies, such as unsloth/Qwen3-8B-bnb-4bit, and what each is. No torch.

What a repository holds is in its config.json; a name is all that a file of another program has.
"""

import re
from typing import Literal, NamedTuple

# How a name ends -> the form, as people call it; tried in this order, on the end that is left, until none is.
_ENDINGS: tuple[tuple[str, str], ...] = (
    (r"-(?:unsloth-)?bnb-4bit|-(?:nf4|bnb|4bit-bnb)", "bitsandbytes, 4 bits"),
    (r"-bnb-8bit", "bitsandbytes, 8 bits"),
    (r"(?:-(?:q\d\w*|i1|ud\w*|imat|imatrix))*-gguf", "GGUF"),
    (r"-gptq-?(?:int8|8bit|w8a16|8bits)", "GPTQ, 8 bits"),
    (
        r"-gptq(?:[-_]?(?:int4|4bit|w4a16|4bits|model|marlin))*(?:-\d+g)?(?:-actorder(?:_true)?)?",
        "GPTQ, 4 bits",
    ),
    (r"-awq(?:[-_]?(?:int4|4bit|w4a16|gemm))*", "AWQ, 4 bits"),
    (r"[-.]quantized\.w8a\d+|-w8a\d+|-int8", "compressed-tensors, 8 bits"),
    (r"[-.]quantized\.w4a\d+|-w4a\d+|-int4", "compressed-tensors, 4 bits"),
    (r"-fp8(?:[-_](?:dynamic|static|block|kv|tensorwise))*", "FP8"),
    (r"-(?:nvfp4|fp4)(?:a16)?", "NVFP4"),
    (r"-mxfp4(?:-q8)?", "MXFP4"),
    (r"-(?:mlx-)?[2-4]bit(?:-dwq(?:-v\d+)?)?|-4bit-\w+|-dwq", "MLX, 4 bits"),
    (r"-(?:mlx-)?[568]bit", "MLX, 8 bits"),
    (r"-(?:mlx-)?(?:bf16|fp16)|-mlx", "MLX"),
)
Bits = Literal["nf4", "int8", "none"]


class Copy(NamedTuple):
    """`form`: what the copy is; `stem`: its name without the ending; `quantize`: what a recipe does like it."""

    form: str
    organization: str
    stem: str
    quantize: Bits

    @property
    def is_trained(self) -> bool:
        """Whether an adapter can be trained on the copy itself."""
        return self.form not in ("GGUF", "MXFP4")


def quantized_copy(name: str) -> Copy | None:
    """What a Hub id's ending says; None for a folder, and for a name without such an ending."""
    organization, slash, model = name.partition("@")[0].partition("/")
    if not slash or "/" in model:
        return None
    form = ""
    stem = model
    for pattern, label in _ENDINGS:
        is_of_mlx = not label.startswith("MLX") or "mlx" in name.lower() or "bit" in pattern
        if not is_of_mlx or (ending := re.search(rf"(?:{pattern})$", stem, re.IGNORECASE)) is None:
            continue
        form = form or label
        stem = stem[: ending.start()]
    if not form or not stem:
        return None
    quantize: Bits = (
        "nf4" if "4 bits" in form or "FP4" in form else "int8" if "8 bits" in form else "none"
    )
    return Copy(form, organization, stem, quantize)
