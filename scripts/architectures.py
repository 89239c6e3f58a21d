"""Takes every causal architecture of the installed transformers through Bloomery, as a tiny random model.

    python scripts/architectures.py                 # all of them; a table
    python scripts/architectures.py lfm2 bamba      # these
    python scripts/architectures.py --store         # and keep the rows in the result beside this file

Each model is made from its config class with every size shrunk, saved by transformers, opened by Bloomery, scored
(within 1e-4), trained for three steps beside transformers' own model, exported and opened again by transformers. Packed
documents must have the logits that each has alone. The first thing that fails is the reason in the table.

B batch, T time.
"""

import argparse
import json
import logging
import os
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

os.environ["TRANSFORMERS_VERBOSITY"] = "critical"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TQDM_DISABLE"] = "1"

import torch
import torch.nn.functional as F
from torch import Tensor

RESULT = Path(__file__).with_name("architectures.json")
SECONDS = 60
LENGTHS = (11, 16)  # of the two documents of a row
STEPS = 3
SCORED = 1e-4  # largest difference of logits, as a share of the largest one
PACKED = 1e-5
EXPERT_KEYS = (
    "num_local_experts",
    "num_experts",
    "n_routed_experts",
    "moe_num_experts",
    "num_experts_per_tok",
)


def _lfm2(settings: dict[str, Any]) -> None:
    settings |= {"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2}


def _lfm2_moe(settings: dict[str, Any]) -> None:
    _lfm2(settings)
    settings["num_dense_layers"] = 1


def _head_width(settings: dict[str, Any]) -> None:
    settings["head_dim"] = 16


def _kv_heads(settings: dict[str, Any]) -> None:
    settings["num_key_value_heads"] = 2


def _dense_granite(settings: dict[str, Any]) -> None:
    """Granite 4.0-H's dense sizes: no experts, state-space layers and attention."""
    settings |= {
        "num_local_experts": 0,
        "num_experts_per_tok": 0,
        "layer_types": ["mamba", "attention"],
        "shared_intermediate_size": 48,
    }


def _dbrx(settings: dict[str, Any]) -> None:
    """Its class asks for what only published files state."""
    settings["attn_config"] |= {"rope_theta": 5e5, "kv_n_heads": 2, "clip_qkv": 8}


def _deepseek_v2(settings: dict[str, Any]) -> None:
    settings["num_experts_per_tok"] = 2


def _dots1(settings: dict[str, Any]) -> None:
    """The published model states all of these; its class has none."""
    settings |= {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2}
    settings |= {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}


def _dense_laguna(settings: dict[str, Any]) -> None:
    settings |= {"mlp_layer_types": ["dense"] * settings["num_hidden_layers"], "num_experts": 0}


def _zamba(settings: dict[str, Any]) -> None:
    kinds = ["linear_attention", "hybrid", "linear_attention", "hybrid"]
    settings |= {"num_hidden_layers": 4, "layers_block_type": kinds, "attention_hidden_size": 128}
    settings |= {"attention_head_dim": 32, "mamba_dt_rank": 4, "n_mamba_heads": 2}


def _zamba2(settings: dict[str, Any]) -> None:
    kinds = ["linear_attention", "hybrid", "linear_attention", "hybrid"]
    settings |= {"num_hidden_layers": 4, "layers_block_type": kinds, "attention_hidden_size": 128}
    settings |= {"attention_head_dim": 32, "mamba_headdim": 16, "n_mamba_heads": 8}
    settings["hybrid_layer_ids"] = [1, 3]


def _falcon_h1(settings: dict[str, Any]) -> None:
    settings |= {"mamba_d_head": 16, "mamba_n_heads": 4, "mamba_d_ssm": 64, "mamba_n_groups": 1}


def _reformer(settings: dict[str, Any]) -> None:
    settings |= {"axial_pos_embds_dim": [16, 48], "axial_pos_shape": [8, 8]}


def _gemma4(settings: dict[str, Any]) -> None:
    settings.pop("per_layer_config", None)
    settings |= {
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
    }


def _gemma3n(settings: dict[str, Any]) -> None:
    settings |= {
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
        "intermediate_size": [48] * 4,
        "activation_sparsity_pattern": [0.0] * 4,
    }


def _nemotron_h(settings: dict[str, Any]) -> None:
    """Nemotron-H's dense sizes."""
    settings.pop("num_hidden_layers", None)
    settings |= {"layers_block_type": ["linear_attention", "full_attention", "mlp"]}
    settings |= {"mamba_num_heads": 4, "mamba_head_dim": 16, "n_groups": 1, "chunk_size": 8}
    settings |= {"n_routed_experts": 1}


def _cohere_compass(settings: dict[str, Any]) -> None:
    rotation = {"rope_type": "default", "rope_theta": 10_000.0}
    settings |= {
        "rope_parameters": {"full_attention": rotation, "sliding_attention": rotation},
        "layer_types": ["sliding_attention", "full_attention"],
        "num_hidden_layers": 2,
    }


def _xlm(settings: dict[str, Any]) -> None:
    settings["causal"] = True


def _xlnet(settings: dict[str, Any]) -> None:
    settings["attn_type"] = "uni"


def _xmod(settings: dict[str, Any]) -> None:
    settings["default_language"] = "en_XX"


# What the tiny config needs beside smaller sizes.
CHANGES: dict[str, Callable[[dict[str, Any]], None]] = {
    "cohere_compass_text": _cohere_compass,
    "dbrx": _dbrx,
    "deepseek_v2": _deepseek_v2,
    "dots1": _dots1,
    "falcon_h1": _falcon_h1,
    "gemma3n_text": _gemma3n,
    "gemma4_text": _gemma4,
    "gemma4_unified_text": _gemma4,
    "granitemoehybrid": _dense_granite,
    "hunyuan_v1_dense": _head_width,
    "hunyuan_v1_moe": _head_width,
    "laguna": _dense_laguna,
    "lfm2": _lfm2,
    "lfm2_moe": _lfm2_moe,
    "ministral": _head_width,
    "nemotron": _kv_heads,
    "nemotron_h": _nemotron_h,
    "reformer": _reformer,
    "xlm": _xlm,
    "xlnet": _xlnet,
    "xmod": _xmod,
    "zamba": _zamba,
    "zamba2": _zamba2,
}
# Not a decoder of text by itself: what else it needs.
OTHER_INPUTS = {
    "blt": "it makes patches of bytes with a second model",
    "cpmant": "its prompts and segments are inputs of their own",
    "gemma4_assistant": "it guesses tokens for another model, whose states it reads",
    "gemma4_unified_assistant": "it guesses tokens for another model, whose states it reads",
    "moshi": "it decodes audio",
    "musicgen": "it decodes audio",
    "musicgen_melody": "it decodes audio",
}


# Whose kind no key of their config says.
KINDS = {
    "dots1": "experts",
    "fuyu": "multimodal",
    "git": "multimodal",
    "got_ocr2": "multimodal",
    "hunyuan_v1_moe": "experts",
}


@dataclass(frozen=True)
class Row:
    """What was seen of one architecture. `kind`: dense or hybrid, experts, multimodal, part of another model."""

    name: str
    architecture: str
    kind: str
    layers: str  # "native" or "transformers"
    documents: str  # how those of a row are kept apart
    logits: float | None
    packed: float | None
    trained: float | None
    exported: float | None
    cached: float | None
    problem: str
    seconds: float

    @property
    def passes(self) -> bool:
        return not self.problem


class TookTooLong(Exception):
    """The time limit of one architecture."""


@contextmanager
def limited(seconds: int) -> Iterator[None]:
    def stop(*_: object) -> None:
        raise TookTooLong(f"more than {seconds} s")

    signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)


def names() -> list[str]:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def tiny_model(name: str) -> Any:
    """Transformers' model of the architecture, small and random, in evaluation mode."""
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    from bloomery.model.tiny_configs import tiny_config
    from bloomery.model.transformers_backend import persistent_buffers
    from bloomery.model.transformers_trial import draw_weights

    config = tiny_config(CONFIG_MAPPING[name](), CHANGES.get(name))
    if getattr(config, "is_decoder", None) is False:
        config.is_decoder = True  # BERT and its relatives see later tokens else
    torch.manual_seed(0)
    build: Any = AutoModelForCausalLM.from_config
    model = build(config, dtype=torch.float32).eval()
    draw_weights(model)
    model.tie_weights()
    # Numbers that files keep beside parameters are not those that every model begins with.
    for buffer in persistent_buffers(model).values():
        if buffer.is_floating_point():
            buffer.mul_(1.25)
    return model


def kind_of(name: str) -> str:
    """What an architecture is by the keys of its config, before anything is built of it."""
    from transformers import CONFIG_MAPPING

    if name in OTHER_INPUTS:
        return "part of another model"
    if name in KINDS:
        return KINDS[name]
    settings: dict[str, Any] = CONFIG_MAPPING[name]().to_dict()
    if any(key in settings for key in ("vision_config", "audio_config", "vq_config")):
        return "multimodal"
    if name in CHANGES:
        CHANGES[name](settings)
    texts = (settings, settings.get("text_config") or {}, settings.get("ffn_config") or {})
    if any((text.get(key) or 0) > 1 for text in texts for key in EXPERT_KEYS):
        return "experts"
    if "encoder_layers" in settings or "num_encoder_layers" in settings:
        return "decoder of an encoder"
    return "dense or hybrid"


def difference(actual: Tensor, exact: Tensor) -> float:
    return float((actual - exact).abs().max() / exact.abs().max())


def attempt(name: str, implementation: str = "auto") -> Row:
    """Everything that the table says of one architecture."""
    from bloomery.core.errors import UserError

    began = time.perf_counter()
    facts: dict[str, Any] = {"architecture": "", "kind": "", "layers": "", "documents": ""}
    seen: dict[str, float | None] = dict.fromkeys(
        ("logits", "packed", "trained", "exported", "cached")
    )
    problem = ""
    try:
        with limited(SECONDS), tempfile.TemporaryDirectory() as folder:
            _attempt(name, Path(folder), implementation, facts, seen)
    except Exception as error:  # any failure is a row of the table
        # Of an error of ours the problem, without the path of this try.
        reason = error.problem if isinstance(error, UserError) else str(error)
        problem = " ".join(reason.split())[:160] or type(error).__name__
    return Row(
        name=name, **facts, **seen, problem=problem, seconds=round(time.perf_counter() - began, 1)
    )


def _attempt(
    name: str, folder: Path, implementation: str, facts: dict[str, Any], seen: dict[str, Any]
) -> None:
    from transformers import AutoModelForCausalLM

    from bloomery.model.configs import read_config
    from bloomery.model.io.weights import model_state, write_model

    if name in OTHER_INPUTS:
        facts["kind"] = "part of another model"
        raise ValueError(OTHER_INPUTS[name])
    facts["kind"] = kind_of(name)
    their_model = tiny_model(name)
    facts["architecture"] = type(their_model).__name__
    their_model.save_pretrained(folder / "saved")
    config = read_config(folder / "saved", implementation)
    backend = config.transformers_backend
    facts["layers"] = "native" if backend is None else "transformers"
    facts["documents"] = "mask" if backend is None else backend.documents
    our_model = _opened(config, folder / "saved")
    vocabulary = config.vocab_size
    tokens_BT = torch.randint(
        3, vocabulary, (2, sum(LENGTHS)), generator=torch.Generator().manual_seed(1)
    )
    # Text holds no places of pictures: a multimodal model would look for what is seen there.
    for key, token in their_model.config.to_dict().items():
        if key.endswith("token_id") and type(token) is int and kind_of(name) == "multimodal":
            tokens_BT[tokens_BT == token] = 5

    def theirs(tokens_BT: Tensor) -> Tensor:
        logits: Tensor = their_model(input_ids=tokens_BT, use_cache=False).logits
        return logits

    # 1. Scored as transformers scores.
    with torch.no_grad():
        their_logits = theirs(tokens_BT)
        seen["logits"] = difference(our_model(tokens_BT).head, their_logits)
        assert seen["logits"] <= SCORED, f"logits differ by {seen['logits']:.1g}"

        beginning = our_model(tokens_BT[:, : LENGTHS[0]]).head
        seen_later = difference(our_model(tokens_BT).head[:, : LENGTHS[0]], beginning)
        assert seen_later <= SCORED, f"its tokens see later ones ({seen_later:.1g})"

        # 2. Two documents of a row, each as it is alone.
        document_T = torch.arange(sum(LENGTHS)).ge(LENGTHS[0]).long()
        position_T = torch.arange(sum(LENGTHS)) - document_T * LENGTHS[0]
        shape = tokens_BT.shape
        packed = our_model(
            tokens_BT, documents_BT=document_T.expand(shape), positions_BT=position_T.expand(shape)
        ).head
        alone = torch.cat([theirs(part) for part in tokens_BT.split(LENGTHS, 1)], 1)
        seen["packed"] = difference(packed, alone)
        assert seen["packed"] <= PACKED, f"packed documents differ by {seen['packed']:.1g}"

        # 3. A text that is continued.
        seen["cached"] = difference(_continued(our_model, tokens_BT[:1]), their_logits[:1])
        assert seen["cached"] <= SCORED, f"a continued text differs by {seen['cached']:.1g}"

    # 4. Three steps of AdamW beside transformers' model.
    our_losses = _losses(our_model, lambda tokens_BT: our_model(tokens_BT).head, tokens_BT)
    their_losses = _losses(their_model, theirs, tokens_BT)
    seen["trained"] = max(
        abs(ours - theirs_) for ours, theirs_ in zip(our_losses, their_losses, strict=True)
    )
    assert seen["trained"] <= 1e-3, f"losses {our_losses} and {their_losses}"
    assert our_losses[-1] < our_losses[0], f"losses {our_losses} do not fall"

    # 5. Exported, and opened by transformers.
    exported = folder / "exported"
    exported.mkdir()
    write_model(model_state(our_model), our_model.config, exported)
    load: Any = AutoModelForCausalLM.from_pretrained
    opened, info = load(exported, output_loading_info=True, dtype=torch.float32)
    for key in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        assert not info[key], f"{key}: {sorted(map(str, info[key]))[:3]}"
    with torch.no_grad():
        opened_logits = opened.eval()(input_ids=tokens_BT, use_cache=False).logits
        seen["exported"] = difference(our_model(tokens_BT).head, opened_logits)
    assert seen["exported"] <= SCORED, f"the export differs by {seen['exported']:.1g}"


def _opened(config: Any, folder: Path) -> Any:
    """Bloomery's model, native or not as the config says, in evaluation mode."""
    from bloomery.model.decoder import Decoder
    from bloomery.model.io.weights import give_memory, read_model

    is_native = config.transformers_backend is None
    with torch.device("meta"):
        decoder = Decoder(config, attention="math" if is_native else "mask")
    give_memory(decoder, "cpu")
    read_model(decoder, folder)
    return decoder.eval()


def _continued(model: Any, row_BT: Tensor) -> Tensor:
    from bloomery.model.cache import Cache

    cache = Cache(model.config, row_BT.shape[1])
    parts = row_BT.split((12, 1, 1, row_BT.shape[1] - 14), 1)
    return torch.cat([model(part, cache=cache).head for part in parts], 1)


def _losses(
    model: torch.nn.Module, logits_of: Callable[[Tensor], Tensor], tokens_BT: Tensor
) -> list[float]:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3, weight_decay=0.0)
    losses = []
    for _ in range(STEPS):
        logits = logits_of(tokens_BT)[:, :-1]
        loss = F.cross_entropy(logits.flatten(0, 1), tokens_BT[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        # All gradients of a parameter that decides nothing are rounding, which AdamW would make steps of.
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def stored_rows() -> dict[str, Row]:
    """The rows of the stored result, by name."""
    rows = json.loads(RESULT.read_text(encoding="utf-8"))["rows"]
    return {row["name"]: Row(**row) for row in rows}


def table(rows: list[Row]) -> Iterator[str]:
    yield "| architecture | kind | layers | documents | logits | packed | cached | losses | export | seconds | |"
    yield "|---|---|---|---|--:|--:|--:|--:|--:|--:|---|"
    for row in rows:
        numbers = (row.logits, row.packed, row.cached, row.trained, row.exported)
        cells = ("" if number is None else f"{number:.0e}" for number in numbers)
        verdict = row.problem or "passes"
        first = f"| {row.name} | {row.kind} | {row.layers} | {row.documents} |"
        yield f"{first} {' | '.join(cells)} | {row.seconds} | {verdict} |"
    for kind in sorted({row.kind for row in rows}):
        of_kind = [row for row in rows if row.kind == kind]
        yield f"\n{kind or 'not built'}: {sum(row.passes for row in of_kind)} of {len(of_kind)} pass"


def main() -> None:
    import transformers

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("names", nargs="*", help="model types; default: all")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--store", action="store_true", help=f"write {RESULT.name}, too")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    rows = []
    for name in arguments.names or names():
        rows.append(attempt(name))
        print(
            f"{name}: {rows[-1].problem or 'passes'} ({rows[-1].seconds} s)",
            file=sys.stderr,
            flush=True,
        )
    versions = {"transformers": transformers.__version__, "torch": torch.__version__}
    if arguments.store and arguments.names and RESULT.is_file():
        assert json.loads(RESULT.read_text())["versions"] == versions, "run all of them"
        kept = stored_rows() | {row.name: row for row in rows}
        rows = [kept[name] for name in names() if name in kept]
    result = {"versions": versions, "rows": [asdict(row) for row in rows]}
    if arguments.store:
        RESULT.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result, indent=1) if arguments.json else "\n".join(table(rows)))


if __name__ == "__main__":
    main()
