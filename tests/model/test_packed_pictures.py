"""Documents with pictures in one row compute what each computes alone: features, logits and gradients."""

import json
from itertools import chain

import pytest
import torch
from torch.testing import assert_close

from bloomery.data.loader import Loader
from bloomery.data.order import Cursor
from bloomery.data.pictures.batches import axis_positions
from bloomery.data.pictures.processor import PictureProcessor
from bloomery.facts.pictures import vision_of
from bloomery.infer.forward import forward
from bloomery.model.forward_input import ALL_LOGITS
from bloomery.model.io.weights import load_decoder
from bloomery.model.pictures import SeenPictures
from bloomery.model.vision import load_tower
from pictures_for_tests import BLUE, RED, TEXT, png, prepared_rows, row
from tiny_composites import CONFIGS, PICTURE, composite, picture_inputs

GRIDS = [(1, 2), (2, 2)]  # of Qwen's two pictures
WINDOW_PASSED = list(range(20, 60))  # more tokens than a window has
# A picture at both ends of a border, where only the documents tell them apart, and padding.
DOCUMENTS = [[*WINDOW_PASSED, 7, "picture"], ["picture", *WINDOW_PASSED, 9, 10], [5, 6, 8]]
NUM_PADDING = 3


def only(kind, inputs, index):
    """Of what the processor made of two pictures, one."""
    if kind.startswith("qwen"):
        ends = inputs["image_grid_thw"].prod(1).cumsum(0).tolist()
        rows = slice([0, *ends][index], ends[index])
        return {
            "pixel_values": inputs["pixel_values"][rows],
            "image_grid_thw": inputs["image_grid_thw"][index : index + 1],
        }
    if kind == "smolvlm":
        return {name: value[:, index : index + 1] for name, value in inputs.items()}
    return {name: value[index : index + 1] for name, value in inputs.items()}


def seen(model, tokens, inputs):
    """None of a row without pictures."""
    if inputs is None:
        return None
    features = model.vision(inputs)
    places = (tokens.flatten() == PICTURE).nonzero().squeeze(1)
    assert len(places) == len(features.features_ND)
    return SeenPictures(places, *features, both_ways=model.vision.vision.both_ways)


def computed(kind, model, tokens, documents, inputs, grids):
    """Logits [T, V] of a row, and its gradients by parameter, of a loss that weighs each logit by its token's."""
    positions = torch.zeros_like(documents)
    for number in documents.unique():
        of_document = documents == number
        positions[of_document] = torch.arange(int(of_document.sum()))
    axes = None
    if kind.startswith("qwen"):
        axes = axis_positions(tokens.numpy(), documents.numpy(), grids, picture=PICTURE)
        axes = torch.from_numpy(axes)[:, None]
    logits = model(
        tokens[None],
        positions_BT=positions[None],
        documents_BT=documents[None],
        pictures=seen(model, tokens, inputs),
        axes_3BT=axes,
    ).head[0]
    model.zero_grad()
    weights_V = torch.linspace(-1, 1, logits.shape[-1], dtype=logits.dtype)
    (logits[documents >= 0].log_softmax(-1) * weights_V).sum().backward()
    gradients = {
        name: parameter.grad.clone()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    return logits.detach(), gradients


@pytest.mark.parametrize(
    ("kind", "asked"),
    [
        *((kind, "vision" if kind == "gemma4_unified" else None) for kind in CONFIGS),
        ("gemma4", "vision"),
    ],
    ids=[*CONFIGS, "gemma4, both ways"],
)
def test_documents_in_one_row_compute_what_each_does_alone(kind, asked, tmp_path):
    whole = composite(kind).double()
    if asked is not None:
        whole.config.text_config.use_bidirectional_attention = asked
    whole.save_pretrained(tmp_path)
    model = load_decoder(tmp_path, dtype=torch.float64)
    model.use_attention("mask")
    vision = vision_of(whole.config.to_dict())
    assert (vision.both_ways == "windows") == (asked is not None)
    model.see(load_tower(vision, tmp_path, dtype=torch.float64, device=torch.device("cpu")))
    for parameter in model.parameters():
        parameter.requires_grad_()

    inputs = picture_inputs(kind)
    single = [only(kind, inputs, index) for index in (0, 1)]
    sizes = iter([len(model.vision(each).features_ND) for each in single])
    rows = [
        [token for each in document for token in spelled(each, sizes)] for document in DOCUMENTS
    ]
    alone = [
        computed(
            kind,
            model,
            torch.tensor(tokens),
            torch.zeros(len(tokens), dtype=torch.int64),
            picture,
            grids,
        )
        for tokens, picture, grids in zip(
            rows, [*single, None], [GRIDS[:1], GRIDS[1:], []], strict=True
        )
    ]

    packed = torch.tensor([*chain(*rows), *[0] * NUM_PADDING])
    numbers = [number for number, tokens in enumerate(rows) for _ in tokens]
    documents = torch.tensor(numbers + [-1] * NUM_PADDING)
    logits, gradients = computed(kind, model, packed, documents, inputs, GRIDS)

    expected = torch.cat([each for each, _ in alone])
    assert_close(logits[documents >= 0], expected, atol=1e-10, rtol=1e-10)
    for name, gradient in gradients.items():
        total = sum(of_one[name] for _, of_one in alone if name in of_one)
        assert_close(
            gradient, total, atol=1e-10, rtol=1e-10, msg=lambda text, name=name: f"{name}: {text}"
        )


def spelled(part, sizes):
    return [PICTURE] * next(sizes) if part == "picture" else [part]


@pytest.mark.parametrize("kind", ["gemma3", "qwen3_5", "smolvlm"])
def test_packed_rows_of_a_dataset_have_the_pictures_of_their_documents(kind, tmp_path):
    rows = [
        row(RED, TEXT, BLUE, answer="both"),
        row(TEXT, answer="none"),
        row(BLUE, TEXT, answer="a blue one"),
        row(RED, answer="red"),
    ]
    prepared = prepared_rows(tmp_path, rows, kind=kind, weights=True)
    base = tmp_path / "base"
    model = load_decoder(base, dtype=torch.float32)
    model.use_attention("mask")
    vision = vision_of(json.loads((base / "config.json").read_text()))
    model.see(load_tower(vision, base, dtype=torch.float32, device=torch.device("cpu")))

    def logits_by_tokens(layout):
        """Of every document, by its tokens."""
        loader = Loader(prepared, sequence_length=512, layout=layout, seed=0)
        batch = loader.batch(Cursor(0, 0), loader.sequences)
        with torch.no_grad():
            logits = forward(model, batch, ALL_LOGITS, precision="float32").head
        found = {}
        for tokens, documents, of_row in zip(batch.tokens, batch.documents, logits, strict=True):
            for number in range(int(documents.max()) + 1):
                is_here = documents == number
                found[tuple(tokens[is_here].tolist())] = of_row[is_here]
        return loader.sequences, found

    num_packed, packed = logits_by_tokens("packed")
    num_padded, padded = logits_by_tokens("padded")
    assert num_packed < num_padded == len(rows) == len(packed)
    assert packed.keys() == padded.keys()
    for tokens, logits in packed.items():
        assert_close(logits, padded[tokens], atol=1e-5, rtol=1e-5)


def test_pictures_of_a_document_are_in_the_order_of_its_turns(tmp_path):
    prepared = prepared_rows(tmp_path, [row(BLUE, TEXT, RED)], kind="gemma3")
    batch = Loader(prepared, sequence_length=512, layout="packed", seed=0).batch(Cursor(0, 0), 1)
    vision = vision_of(json.loads((tmp_path / "base" / "config.json").read_text()))
    processor = PictureProcessor(tmp_path / "base", vision)
    expected = processor.process([png(color="blue"), png(color="red")]).inputs["pixel_values"]
    assert torch.equal(batch.pictures.inputs["pixel_values"], expected)
