"""llama.cpp itself, as the xllamacpp package has it prebuilt, reads pictures with our mmproj files as a model does."""

import base64
import io
import json
import os
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForImageTextToText

from bloomery.data.chat.render import chat_format
from bloomery.data.examples import PICTURE, Message
from bloomery.data.tokenizer.tokenizer import load_tokenizer
from bloomery.export.gguf import export_gguf, export_gguf_adapter
from bloomery.infer.load import Use, load_used
from bloomery.infer.model_folder import ModelFiles, find_model
from bloomery.infer.past import Past
from bloomery.infer.picture_prompts import open_eyes
from bloomery.model.decoder import Decoder
from pictures_for_tests import save_base

llama_cpp = pytest.importorskip("xllamacpp", reason="not installed: pip install xllamacpp")
pytestmark = pytest.mark.soak
MARKER = "<__media__>"
CONTEXT = 1024


@dataclass(frozen=True)
class Case:
    """A tiny model, and the width and height of a picture that neither side resizes: the colors are the same then.

    `around`: what the model's processor writes before and after a picture, and llama.cpp does not. `computed`: makes a
    model compute what an export says that llama.cpp computes otherwise.
    """

    size: tuple[int, int]
    vision: dict = field(default_factory=dict)
    text: dict = field(default_factory=dict)
    processor: dict = field(default_factory=dict)
    around: tuple[str, str] = ("", "")
    computed: Callable[[Decoder], None] = lambda decoder: None


def move_positions(decoder: Decoder) -> None:
    """InternVL: each patch has the position of the one before it, the class token that of the last."""
    table = decoder.vision.tower.vision_tower.embeddings.position_embeddings
    table.data = table.data.roll(1, 1)


def see_both_ways_in_all_layers(decoder: Decoder) -> None:
    decoder.vision.vision = replace(decoder.vision.vision, both_ways="all")


CASES = {
    "qwen2_5_vl": Case(
        (168, 112),
        vision={"patch_size": 14, "window_size": 112},
        # b11549 reads no epsilon of the graph qwen2vl, which is felt where embeddings are small.
        text={"rms_norm_eps": 1e-12},
        processor={"patch_size": 14, "max_pixels": 2**20},
    ),
    # Features of inner layers for two of four layers. Fewer tokens than llama.cpp makes, but for the file's limit.
    "qwen3_vl": Case((64, 64), text={"num_hidden_layers": 4}),
    "qwen3_5": Case((128, 64)),
    "gemma3": Case((56, 56), around=("\n\n", "\n\n")),
    "smolvlm": Case((128, 128)),
    "mistral3": Case((112, 84)),
    # Two squares, and the whole as a third.
    "internvl": Case(
        (112, 56),
        processor={"crop_to_patches": True},
        computed=move_positions,
    ),
    "lfm2_vl": Case(
        (256, 256),
        processor={"max_image_tokens": 256, "min_image_tokens": 64, "tile_size": 512},
    ),
    "gemma4_unified": Case(
        (256, 256),
        text={"sliding_window": CONTEXT},
        processor={"max_soft_tokens": 280},
        computed=see_both_ways_in_all_layers,
    ),
    "gemma4": Case(
        (512, 512),
        text={"sliding_window": CONTEXT},
        processor={"max_soft_tokens": 280},
        computed=see_both_ways_in_all_layers,
    ),
}
# As its smaller sizes have their linear layers, and the larger ones their output.
CASES["gemma4-limits"] = replace(
    CASES["gemma4"], vision={"use_clipped_linears": True, "standardize": True}
)
LIMIT = 2e-4  # of a log-probability; ggml takes GELU from a table in float16, and by tanh


def saved(kind: str, folder: Path) -> Path:
    """Weights so large that a picture matters to the answer."""
    case = CASES[kind]
    save_base(
        kind.removesuffix("-limits"),
        folder,
        weights=True,
        vision_config=case.vision,
        text_config=case.text | {"max_position_embeddings": CONTEXT},
    )
    path = folder / "preprocessor_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | case.processor))
    weights = load_file(folder / "model.safetensors")
    torch.manual_seed(3)
    for name, tensor in weights.items():
        if tensor.ndim == 0:
            weights[name] = torch.tensor(0.9 if name.endswith("max") else -1.1)
        elif (
            any(part in name for part in ("vis", "proj", "connector"))
            and "language_model" not in name
        ):
            size = 0.15 if tensor.ndim > 1 else 0.1
            size = 0.5 if "pos" in name else size
            weights[name] = (tensor if tensor.ndim == 1 else 0) + size * torch.randn_like(tensor)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


def picture_of(size: tuple[int, int], *, blank: bool = False) -> str:
    """Base64 of a PNG, of squares of 8 colors."""
    width, height = size
    colors = np.random.default_rng(0).integers(0, 255, (2, 2, 3), dtype=np.uint8)
    pixels = colors.repeat(height // 2, 0).repeat(width // 2, 1)
    stream = io.BytesIO()
    Image.fromarray(pixels * (0 if blank else 1)).save(stream, "PNG")
    return base64.b64encode(stream.getvalue()).decode()


def server_of(model: Path, mmproj: Path, lora: Path | None = None) -> Any:
    os.environ["LLAMA_MEDIA_MARKER"] = MARKER
    settings = llama_cpp.CommonParams()
    settings.model.path = str(model)
    settings.mmproj.path = str(mmproj)
    settings.mmproj_use_gpu = False
    if lora is not None:
        adapter = llama_cpp.CommonAdapterLoraInfo()
        adapter.path = str(lora)
        adapter.scale = 1.0
        settings.lora_adapters = [adapter]
    settings.n_ctx = CONTEXT
    settings.n_parallel = 1
    settings.n_gpu_layers = 0
    settings.warmup = False
    settings.verbosity = -1
    settings.cpuparams.n_threads = settings.cpuparams_batch.n_threads = 1
    settings.cache_type_k = settings.cache_type_v = llama_cpp.ggml_type.GGML_TYPE_F32
    settings.flash_attn_type = llama_cpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    return llama_cpp.Server(settings)


class Seeing:
    """Bloomery's model."""

    def __init__(self, kind: str, files: ModelFiles, stack: ExitStack) -> None:
        self.decoder = load_used(files, Use("cpu"), decodes=True)
        encoder = open_eyes(self.decoder, files)
        CASES[kind].computed(self.decoder)
        self.form = stack.enter_context(chat_format(load_tokenizer(files.tokenizer), None, encoder))

    def logprobs(self, picture: str) -> tuple[int, Tensor]:
        """The number of tokens of the prompt, and those after it."""
        reference = f"data:image/png;base64,{picture}"
        prompt = self.form.encode([Message("user", f"ab{PICTURE}cd", pictures=(reference,))])
        past = Past(self.decoder)
        logits = past.read([past.reuse(prompt, len(prompt))])
        return len(prompt), logits[0].float().log_softmax(-1)


def assert_sees(kind: str, files: ModelFiles, server: Any) -> None:
    """After a picture llama.cpp gives each token the log-probability that the model gives it."""
    case = CASES[kind]
    with ExitStack() as stack:
        model = Seeing(kind, files, stack)
        num_tokens, expected = model.logprobs(picture_of(case.size))
        _, blank = model.logprobs(picture_of(case.size, blank=True))
    before, after = case.around
    turn = f"<|im_start|>user\nab{before}{MARKER}{after}cd<|im_end|>\n<|im_start|>assistant\n"
    question = {
        "prompt": {"prompt_string": turn, "multimodal_data": [picture_of(case.size)]},
        "n_predict": 1,
        "temperature": 0,
        "n_probs": 50,
        "cache_prompt": False,
        "logit_bias": [[70, 200.0]],  # a whole letter: of half a one the server tells nothing
    }
    answer = httpx.post(f"{server.listening_address}/completion", json=question, timeout=100).json()
    assert "error" not in answer, answer
    assert answer["tokens_evaluated"] == num_tokens
    top = answer["completion_probabilities"][0]["top_logprobs"]
    differences = [abs(entry["logprob"] - float(expected[entry["id"]])) for entry in top]
    seen = max(abs(float(blank[entry["id"]] - expected[entry["id"]])) for entry in top)
    assert max(differences) < LIMIT
    assert seen > 50 * max(differences)


@pytest.mark.parametrize("kind", CASES)
@torch.no_grad()
def test_llama_cpp_sees_a_picture_as_the_model_does(kind: str, tmp_path: Path) -> None:
    files = find_model(saved(kind, tmp_path / "base"))
    done = export_gguf(files, tmp_path / "out.gguf", kind="f32")
    assert done.mmproj is not None
    assert_sees(kind, files, server_of(done.folder, done.mmproj))


@pytest.mark.parametrize("kind", ["qwen3_vl", "smolvlm"])
def test_llama_cpp_adds_an_adapter_of_the_language_model(kind: str, tmp_path: Path) -> None:
    """Beside both files of the base."""
    base = saved(kind, tmp_path / "base")
    targets = r"model\.(text|language)_model\..*(q|down)_proj"
    model = get_peft_model(
        AutoModelForImageTextToText.from_pretrained(base), LoraConfig(r=2, target_modules=targets)
    )
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(tmp_path / "adapter")
    files = find_model(tmp_path / "adapter")
    done = export_gguf(find_model(base), tmp_path / "out.gguf", kind="f32")
    lora = export_gguf_adapter(files, tmp_path / "lora.gguf", kind="f32").folder
    with torch.no_grad():
        assert_sees(kind, files, server_of(done.folder, done.mmproj, lora))
