"""Reward models as rewards: the value at the last token of prompt and completion, as `objective.kind: reward` trains.

A model is read once, in evaluation mode, on the device of the run, and stays there: every rank has a whole copy of it
and scores a part of the texts. The first rank alone would keep all others waiting, and they have the memory anyway, as
the fullest one decides. Which texts share a forward does not depend on the number of ranks, so neither do the values.

Texts are formatted and encoded by the tokenizer and chat template of the reward model, like the pairs that it was
trained on, also where the policy has the same tokenizer: a template writes markup behind an answer that the policy does
not sample.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import torch

from bloomery.core.errors import UserError
from bloomery.data.chat.render import Renderer
from bloomery.data.examples import BadRow, Example, Message, Turns
from bloomery.data.tokenizer.tokenizer import load_tokenizer
from bloomery.hub import local_model
from bloomery.infer.forward import matmul_dtype
from bloomery.infer.held_model import held_model
from bloomery.infer.load import Use, load_used
from bloomery.infer.model_folder import ModelFiles
from bloomery.model.decoder import Decoder
from bloomery.parallel.mesh import Mesh
from bloomery.plan.types import RunPlan
from bloomery.recipe.rewards import ModelReward, reward_name
from bloomery.train.evaluation.scoring import forward_batches, value_scores
from bloomery.train.scorers.client import Scorers


@dataclass(frozen=True)
class LoadedModel:
    """A reward model with what encodes its texts, of at most `longest` tokens. `decoder`: None in scoring processes."""

    decoder: Decoder | None
    renderer: Renderer
    longest: int


@final
class RewardModels:
    """The reward models of a run; used as a context, which ends the processes of their chat templates.

    All ranks must call `start` and `score`.
    """

    def __init__(
        self,
        plan: RunPlan,
        mesh: Mesh,
        *,
        device: str | None = None,
        scorers: Scorers | None = None,
    ) -> None:
        """`device`: unset, that of the run. `scorers`: the processes that have the models, in place of this one."""
        self._rewards = [reward for reward in plan.rewards if isinstance(reward, ModelReward)]
        self._device = device or plan.train.device
        self._precision = plan.train.precision
        self._scorers = scorers
        self._skips = plan.data.on_error == "skip"
        # A forward of training, which keeps activations for its backward, has as many tokens and takes more memory.
        self._tokens_per_forward = plan.train.micro_batch_size * plan.data.sequence_length
        self._mesh = mesh
        self._loaded = dict[str, LoadedModel]()

    def __enter__(self) -> "RewardModels":
        return self

    def __exit__(self, *_raised: object) -> None:
        """The models stay: a rewind begins again with them."""
        for model in self._loaded.values():
            model.renderer.close()

    def start(self) -> None:
        """Reads the models that are not read yet. Raises UserError for one that is none, or does not fit."""
        for reward in self._rewards:
            if reward.model not in self._loaded:
                self._loaded[reward.model] = self._load(reward)

    def score(
        self, prompts: Sequence[Any], completions: Sequence[str]
    ) -> tuple[dict[str, tuple[float, list[float | None]]], list[str]]:
        """Of each reward its weight and its values, and why some completions have none.

        `prompts`: texts or messages, one a completion. Raises UserError for a completion that cannot be encoded, unless
        such are skipped, and for values that are not finite.
        """
        self.start()
        scores = {}
        skipped: list[str] = []
        for reward in self._rewards:
            name = reward_name(reward)
            model = self._loaded[reward.model]
            texts, problems = encode(model, prompts, completions)
            for index, problem in problems.items():
                reason = f"the reward {name} cannot encode completion {index}: {problem}"
                if not self._skips:
                    raise UserError(reason, where="rewards", fix="set data.on_error=skip")
                skipped.append(reason)
            numbers = [index for index in range(len(texts)) if index not in problems]
            values = self._values(reward.model, model.decoder, [texts[index] for index in numbers])
            rewards: list[float | None] = [None] * len(texts)
            for index, value in zip(numbers, values, strict=True):
                if not math.isfinite(value):
                    raise UserError(
                        f"the reward {name} is {value} for completion {index}",
                        where=reward.model,
                        fix="its weights are damaged: use another checkpoint",
                    )
                rewards[index] = value
            scores[name] = (reward.weight, rewards)
        return scores, skipped

    def _values(
        self, name: str, decoder: Decoder | None, texts: Sequence[list[int]]
    ) -> list[float]:
        """The forwards are shared out among the ranks. `name`: of the model, in the recipe."""
        mesh = self._mesh
        most_tokens = self._tokens_per_forward
        batches = forward_batches([len(text) for text in texts], most_tokens)
        own_batches = batches[mesh.rank :: mesh.world]
        own_texts = [[texts[index] for index in batch] for batch in own_batches]
        if decoder is None:
            assert self._scorers is not None
            by_batch = self._scorers.values(name, own_texts, tokens_per_forward=most_tokens)
        else:
            by_batch = [
                value_scores(decoder, of_batch, most_tokens).tolist() for of_batch in own_texts
            ]
        own_values = [
            (index, value)
            for batch, values_of_batch in zip(own_batches, by_batch, strict=True)
            for index, value in zip(batch, values_of_batch, strict=True)
        ]
        values = [math.nan] * len(texts)
        for values_of_rank in mesh.all_gather_json(own_values):
            for index, value in values_of_rank:
                values[index] = value
        return values

    def _load(self, reward: ModelReward) -> LoadedModel:
        """Raises UserError."""
        decoder = None
        # Loading it and its tokenizer are one: a run may delete the checkpoint in between.
        with held_model(local_model(reward.model)) as files:
            if self._scorers is None:
                decoder = load_reward_model(
                    files, reward.model, self._device, precision=self._precision
                )
                longest = decoder.config.max_positions
            else:
                longest = self._scorers.longest_text(reward.model)
            tokenizer = load_tokenizer(files.tokenizer)
        renderer = Renderer(tokenizer, template=None, train_on="assistant")
        return LoadedModel(decoder, renderer, longest)


def load_reward_model(files: ModelFiles, name: str, device: str, *, precision: str) -> Decoder:
    """The reward model of these files, in the dtype of matmuls. `name`: in the recipe. Raises UserError."""
    dtype = matmul_dtype(precision)
    use = Use(device, bfloat16=dtype == torch.bfloat16)
    # Its weights stay in memory for the whole run.
    decoder = load_used(files, use, dtype=dtype, cached=(1, 1))
    if decoder.config.head != "values":
        raise not_a_reward_model(name)
    return decoder.requires_grad_(False).eval()


def not_a_reward_model(model: str) -> UserError:
    return UserError(
        f"not a reward model: {Path(model).name} gives text and no values",
        where=f"rewards, model: {model}",
        fix="train one on preference pairs: objective.kind=reward",
        code=2,
    )


def encode(
    model: LoadedModel, prompts: Sequence[Any], completions: Sequence[str]
) -> tuple[list[list[int]], dict[int, str]]:
    """The token ids of each prompt with its completion, as pairs are encoded for training, and what is wrong by number.

    Texts longer than the model's positions lose their end, as in training.
    """
    examples = [
        Example(f"completion {index}", "completion", prompt_turns(prompt), (response,))
        for index, (prompt, completion) in enumerate(zip(prompts, completions, strict=True))
        for response in [
            completion if isinstance(prompt, str) else (Message("assistant", completion),)
        ]
    ]
    texts: list[list[int]] = []
    problems: dict[int, str] = {}
    for index, encoded in enumerate(model.renderer.encode_batch(examples)):
        if isinstance(encoded, BadRow):
            problems[index] = encoded.problem
            texts.append([])
        else:
            texts.append(encoded[0].ids[: model.longest])
    return texts, problems


def prompt_turns(prompt: str | Sequence[Mapping[str, Any]]) -> Turns:
    """A row's prompt; messages are as templates take them."""
    if isinstance(prompt, str):
        return prompt
    return tuple(
        Message(
            turn["role"],
            turn["content"],
            tuple(turn.get("tool_calls", ())),
            turn.get("name"),
            turn.get("thinking"),
            turn.get("tool_call_id"),
        )
        for turn in prompt
    )
