"""A mixture that only transformers' layers compute: what its plan says of its experts."""

import json

from click.testing import CliRunner

from bloomery.cli.plan import command
from foreign_models import saved_model


def test_the_plan_counts_its_experts_and_says_that_no_loss_evens_their_load(tmp_path):
    saved_model("phimoe", tmp_path, vocab_size=300)
    words = ("--model", str(tmp_path), "tokenizer.from=null", "--gpu", "4090")
    result = CliRunner().invoke(command, (*words, "-v"))
    page = " ".join(result.stdout.split())
    assert result.exit_code == 0, result.output
    # Of 4 experts of 3 matrices of 48 x 32 numbers in 2 layers a token meets 2.
    assert "63,276 parameters, 44,844 active per token (2 of 4 experts)" in page
    assert "no balance loss transformers' layers report no load of their 4 experts" in page
    choices = json.loads(CliRunner().invoke(command, (*words, "--json")).stdout)["choices"]
    assert any(choice["key"] == "router.loss" for choice in choices)
