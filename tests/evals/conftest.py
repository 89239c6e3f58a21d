"""A tiny model, as a folder and loaded with weights whose logits differ, and a prepared dataset."""

from pathlib import Path

import pytest
import torch
from runs_of_the_loop import prepared_corpus

from bloomery.data.tokenizer.tokenizer import load_tokenizer
from bloomery.model.io.weights import load_decoder
from models_for_tests import make_model


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def prepared(tmp_path_factory) -> Path:
    return prepared_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def loaded(model):
    torch.manual_seed(0)
    decoder = load_decoder(model)
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.normal_(std=0.3)
    return decoder, load_tokenizer(model)
