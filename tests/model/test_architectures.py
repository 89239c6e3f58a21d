"""Any causal architecture of transformers, as a tiny random model: transformers itself is the oracle."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

from bloomery.model.document_rows import FIXED_SHARES, document_groups, padding_share
from bloomery.model.transformers_backend import positions_of

SCRIPT = Path(__file__).parents[2] / "scripts" / "architectures.py"
spec = importlib.util.spec_from_file_location("architectures", SCRIPT)
architectures = sys.modules["architectures"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(architectures)

# A mask of positions, a mask of each kind of layer, and rows for a convolution, a delta net and a state space.
SAMPLE = {
    "smollm3": "positions",
    "gemma2": "positions",
    "opt": "mask",
    "lfm2": "rows",
    "qwen3_5_text": "rows",
    "granitemoehybrid": "rows",
    # its activation has numbers that files keep and nothing trains
    "apertus": "positions",
}


@pytest.mark.parametrize("name", SAMPLE)
def test_an_architecture_goes_the_whole_way(name: str) -> None:
    row = architectures.attempt(name, "transformers")
    assert row.passes, row.problem
    assert (row.layers, row.documents) == ("transformers", SAMPLE[name])


@pytest.mark.soak
@pytest.mark.parametrize("name", architectures.names())
def test_every_architecture_does_what_the_stored_table_says(name: str) -> None:
    stored = architectures.stored_rows()[name]
    row = architectures.attempt(name)
    assert row.passes == stored.passes, row.problem


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", ["lfm2", "qwen3_5_text", "granitemoehybrid", "gpt_neox"])
@pytest.mark.parametrize("way", ["positions", "mask"])
def test_a_leak_between_documents_is_found_on_the_weights_that_are_trained(
    name: str, way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from bloomery.model.configs import read_config
    from bloomery.model.decoder import Decoder
    from bloomery.model.io.weights import give_memory, read_model
    from bloomery.model.transformers_checks import check_layers

    architectures.tiny_model(name).save_pretrained(tmp_path)
    with torch.device("meta"):
        model = Decoder(read_config(tmp_path, "transformers"))
    give_memory(model, "cpu")
    read_model(model, tmp_path)
    model.eval()
    # Small weights make small leaks: LFM2's is 4e-5 of the logits in its published scale.
    for name_, parameter in model.named_parameters():
        if parameter.ndim > 1 and "embed" not in name_:
            parameter.data.mul_(0.2)
    model.model.documents = way
    check_layers(model, torch.bfloat16, packed=True)
    is_kept_apart = name == "gpt_neox"
    assert model.model.documents == (way if is_kept_apart else "rows")
    assert ("changes the one after" in model.model.documents_reason) is not is_kept_apart


def opened(name: str, folder: Path):
    """Bloomery's model of a tiny one, and transformers'."""
    from bloomery.model.configs import read_config

    their_model = architectures.tiny_model(name)
    their_model.save_pretrained(folder)
    return architectures._opened(read_config(folder, "transformers"), folder), their_model


TOKENS = torch.randint(3, 96, (2, 24), generator=torch.Generator().manual_seed(4))


@pytest.mark.parametrize("name", ["lfm2", "opt"])
@torch.no_grad()
def test_padding_on_either_side_changes_no_text(name: str, tmp_path: Path) -> None:
    our_model, their_model = opened(name, tmp_path)
    documents_BT = torch.zeros_like(TOKENS)
    documents_BT[0, :5] = -1  # on the left
    documents_BT[1, -7:] = -1  # on the right
    logits = our_model(TOKENS, documents_BT=documents_BT).head
    for row, text in ((0, slice(5, 24)), (1, slice(0, 17))):
        expected = their_model(input_ids=TOKENS[row : row + 1, text], use_cache=False).logits
        torch.testing.assert_close(logits[row : row + 1, text], expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", ["lfm2", "granitemoehybrid"])
def test_gradients_of_packed_documents_are_those_of_each_alone(name: str, tmp_path: Path) -> None:
    our_model, their_model = opened(name, tmp_path)
    documents_BT = torch.arange(24).ge(9).long().expand(2, 24).clone()
    documents_BT[1] = torch.arange(24).ge(20).long()
    probe = torch.randn(2, 24, 96, generator=torch.Generator().manual_seed(5))
    (our_model(TOKENS, documents_BT=documents_BT).head * probe).sum().backward()
    for row, text in ((0, slice(0, 9)), (0, slice(9, 24)), (1, slice(0, 20)), (1, slice(20, 24))):
        logits = their_model(input_ids=TOKENS[row : row + 1, text], use_cache=False).logits
        (logits * probe[row : row + 1, text]).sum().backward()
    their_parameters = dict(their_model.named_parameters())
    for name_, stored_name, _ in our_model.config.transformers_backend.parameters:
        expected = their_parameters[stored_name].grad
        limit = 1e-4 * float(expected.abs().max())
        actual = our_model.get_parameter(name_).grad
        torch.testing.assert_close(actual, expected, atol=limit, rtol=0, msg=name_)


# A cache of keys that is cut, one with states that cannot be, and none of transformers that continues the text.
@pytest.mark.parametrize("name", ["smollm3", "lfm2", "mamba2", "zamba2"])
@torch.no_grad()
def test_a_text_is_cut_copied_and_continued(name: str, tmp_path: Path) -> None:
    from bloomery.model.cache import Cache

    our_model, their_model = opened(name, tmp_path)
    expected = their_model(input_ids=TOKENS[:1], use_cache=False).logits
    first = Cache(our_model.config, 24)
    our_model(TOKENS[:1, :16], cache=first)
    # A text with a window or a state is only cut to nothing, as natively.
    kept = 12 if first.cut(12) else 16
    second = Cache(our_model.config, 24, slots=2)
    second.fill(range(2), first, 0)
    second.rows = range(1, 2)
    continued = our_model(TOKENS[:1, kept:20], cache=second).head
    torch.testing.assert_close(continued, expected[:, kept:20], atol=1e-4, rtol=0)
    # The copies do not share what they keep.
    continued = our_model(TOKENS[:1, kept:], cache=first).head
    torch.testing.assert_close(continued, expected[:, kept:], atol=1e-4, rtol=0)


def test_documents_of_similar_lengths_share_a_forward() -> None:
    documents_BT = torch.tensor([[0, 0, 0, 1, 1, 1, 2, -1], [-1, 0, 0, 0, 0, 0, 0, 1]])
    groups = document_groups(documents_BT, fixed=False)
    assert [group.places.tolist() for group in groups] == [
        [[9, 10, 11, 12, 13, 14]],
        [[0, 1, 2], [3, 4, 5]],
        [[6], [15]],
    ]
    assert padding_share(groups) == 0.0
    fixed_groups = document_groups(documents_BT, fixed=True)
    assert len(fixed_groups) == len(FIXED_SHARES)
    assert sum(len(group.places) for group in fixed_groups) == 5
    assert document_groups(torch.full((1, 4), -1), fixed=False) == []


def test_positions_begin_anew_at_each_document() -> None:
    documents_BT = torch.tensor([[0, 0, 0, 1, 2, 2, -1, -1]])
    assert positions_of(documents_BT).tolist() == [[0, 1, 2, 0, 0, 1, 0, 1]]


def test_numbers_that_json_has_no_words_for_are_read_and_written(tmp_path: Path) -> None:
    from bloomery.facts.hf_config import config_to_hf
    from bloomery.model.configs import read_config

    architectures.tiny_model("granitemoehybrid").save_pretrained(tmp_path)
    assert '"__float__": "Infinity"' in (tmp_path / "config.json").read_text()
    written = config_to_hf(read_config(tmp_path))
    assert written["time_step_limit"] == [0.0, {"__float__": "Infinity"}]
