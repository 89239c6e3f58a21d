"""Completions of several turns: the model answers, tools it calls are called, and it goes on with their results.

Token in, token out: the ids of an answer stay as they were sampled, and what follows it is the difference of two
renderings. Every token is sampled with a number keyed by the episode and its place in it, an environment begins with
the episode's own seed, and the results of all episodes of a turn are waited for together. So an episode depends neither
on how many run at once nor on which rank it runs.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, final

import numpy as np
import torch
from torch import Tensor

from bloomery.core.errors import UserError
from bloomery.data.chat.render import Renderer, as_message, as_turn
from bloomery.data.chat.tool_arguments import Json
from bloomery.data.chat.tools import ToolCall
from bloomery.data.chat.turns import Turns
from bloomery.data.examples import Message
from bloomery.data.order import uniform_numbers
from bloomery.data.prompts import Prompt
from bloomery.data.tokenizer.tokenizer import Tokenizer
from bloomery.infer.completions import Completion, Episode, past_of_turns, sample_completions
from bloomery.infer.past import Past
from bloomery.infer.sampling import Sampling, known_ids
from bloomery.model.decoder import Decoder
from bloomery.plan.types import EpisodesPlan
from bloomery.train.rl.tools import RecordedCalls, ToolResult, Tools


@final
class RunningEpisode:
    """An episode that is played: `number` in the process of the tools, `key` of its random numbers and its seed."""

    def __init__(self, number: int, completion: Completion, key: int) -> None:
        self.number = number
        self.completion = completion
        self.key = key
        self.prompt_ids: list[int] = []
        self.given: list[list[int]] = []
        self.messages: list[dict[str, Any]] = []
        self.calls: list[ToolCall] = []  # of its last answer
        self.num_earlier = 0  # calls in the conversation before those
        self.turns = self.num_calls = self.num_failed = 0
        self.reward: float | None = None
        self.metrics: Mapping[str, float] = {}
        self.opening: list[dict[str, Any]] = []  # the messages of its prompt

    @property
    def ids(self) -> list[int]:
        """All that the model is given for its next answer."""
        return self.prompt_ids + self.completion.ids

    def take_answer(
        self, turns: Turns, ids: Sequence[int], logps: Sequence[float], *, truncated: bool
    ) -> None:
        """An answer joins the episode: its tokens, with the one that ended it unless it is `truncated`; its calls are
        read.
        """
        completion = self.completion
        completion.ids += ids
        completion.logps += logps
        completion.truncated = truncated
        content, self.calls = turns.read(ids if truncated else ids[:-1])
        self.turns += 1
        self.messages.append(message_json(content, self.calls))

    def is_calling(self, turns: Turns) -> bool:
        """Whether its last answer calls tools, and ended as such an answer does."""
        if not self.calls or self.completion.truncated:
            return False
        return turns.ends_turn(self.completion.ids[-1])

    def take_results(
        self,
        turns: Turns,
        results: Sequence[ToolResult],
        *,
        room: int,
        variables: Mapping[str, Any] | None = None,
    ) -> bool:
        """Appends results, which nobody sampled. Those that leave no room for an answer are not given, and the episode
        is over, as with TRL: then False. `room`: tokens that may follow; `variables`: of the chat template.
        """
        self.num_calls += len(results)
        self.num_failed += sum(result.failed for result in results)
        completion = self.completion
        texts = [result.text for result in results]
        ids = turns.given(
            self.calls, texts, completion.ids[-1], variables, num_earlier=self.num_earlier
        )
        self.num_earlier += len(self.calls)
        if len(ids) >= room:
            return False
        self.messages += [
            {"role": "tool", "name": call.name, "content": result.text}
            for call, result in zip(self.calls, results, strict=True)
        ]
        start = len(completion.ids)
        completion.ids += ids
        completion.logps += [0.0] * len(ids)
        self.given.append([start, start + len(ids)])
        return True

    def ended(self) -> Completion:
        self.completion.episode = Episode(
            self.prompt_ids,
            self.given,
            self.messages,
            self.turns,
            self.num_calls,
            self.num_failed,
            self.reward,
            self.metrics,
            self.opening,
        )
        return self.completion


@final
class EpisodeSampler:
    """Plays episodes; a context, which ends the processes of tools and of the chat template."""

    def __init__(
        self,
        plan: EpisodesPlan,
        tokenizer: Tokenizer,
        *,
        longest: int,
        template: str | None = None,
        stop: Callable[[], bool] = lambda: False,
        on_note: Callable[[str], None] = lambda _note: None,
    ) -> None:
        """`longest`: tokens of a prompt and its episode. `template`: of chats; None: the tokenizer's own.

        `on_note`: what the user should know of the tools.
        """
        self._tools = Tools(plan, stop=stop)
        self._renderer = Renderer(tokenizer, template=template, train_on="assistant")
        self._tokenizer = tokenizer
        self._turns: Turns | None = None
        self._max_turns = plan.max_turns
        self._longest = longest
        self._has_environment = plan.environment.is_set
        self._on_note = on_note

    def __enter__(self) -> "EpisodeSampler":
        """Raises UserError for a file of tools that cannot be loaded, and for a chat template without tools."""
        self._turns = Turns(self._renderer, self._tokenizer, self._tools.schemas)
        for note in self._tools.notes:
            self._on_note(note)
        return self

    def __exit__(self, *_raised: object) -> None:
        self._tools.close()
        self._renderer.close()

    @property
    def tools(self) -> Sequence[Json]:
        """What the model is told of the tools."""
        return self._tools.schemas

    @property
    def turns(self) -> Turns:
        assert self._turns is not None, "used as a context"
        return self._turns

    def sample(
        self,
        decoder: Decoder,
        prompts: Sequence[Prompt],
        num_generations: int,
        sampling: Sampling,
        key: Callable[[int, int], int],
        *,
        slots: int,
        recorded: RecordedCalls,
        on_step: Callable[[int], None] = lambda _done: None,
    ) -> list[Completion]:
        """`num_generations` episodes of each prompt. `key`: of an episode, by its prompt's index and its number.

        `sampling.max_new_tokens`: of an episode, given tokens included. Raises NotFinite, UserError and Stopped.
        """
        assert self._turns is not None, "used as a context"
        if self._tools.schemas:  # a task set has none
            sampling = replace(
                sampling, stop_ids=known_ids(*sampling.stop_ids, *self._turns.call_ends)
            )
            self._refuse_ends(sampling)
        episodes = [
            RunningEpisode(index, Completion(prompt, number), key(prompt, number))
            for index, (prompt, number) in enumerate(
                (prompt, number)
                for prompt in range(len(prompts))
                for number in range(num_generations)
            )
        ]
        self._begin(episodes, prompts, sampling.max_new_tokens)
        # An environment has a state that every call may change: recorded results do not replace a call.
        recorded_calls = RecordedCalls(None) if self._has_environment else recorded

        # Where a text keeps its slot from turn to turn, no more are played at once than there are slots.
        capacity = max(
            len(episode.prompt_ids) + self._room(episode, sampling.max_new_tokens)
            for episode in episodes
        )
        past = past_of_turns(decoder, min(slots, len(episodes)), capacity)
        most = len(episodes) if past is None else past.slots
        waiting = deque(episodes)
        playing = list[RunningEpisode]()
        while playing or waiting:
            # 1. The next answer of each, as far as there is room. Those that go on come first.
            while waiting and len(playing) < most:
                playing.append(waiting.popleft())
            report = partial(_report, on_step, len(episodes) - len(waiting) - len(playing))
            limits = [self._room(episode, sampling.max_new_tokens) for episode in playing]
            self._answer(
                decoder,
                playing,
                sampling,
                limits,
                slots=slots,
                past=past,
                on_step=report,
            )

            # 2. The calls of all of them together; an episode without one is over.
            calling = [
                episode
                for episode in playing
                if episode.is_calling(self._turns) and episode.turns < self._max_turns
            ]
            playing = (
                self._call(calling, recorded_calls, sampling.max_new_tokens) if calling else []
            )

        # 3. What the environment thinks of them.
        if self._has_environment:
            conversations = {
                episode.number: [*episode.opening, *episode.messages] for episode in episodes
            }
            scores = self._tools.scores(conversations)
            for episode, score in zip(episodes, scores, strict=True):
                episode.reward = score.reward
                episode.metrics = score.metrics
        self._tools.forget([episode.number for episode in episodes])
        return [episode.ended() for episode in episodes]

    def _refuse_ends(self, sampling: Sampling) -> None:
        """Raises UserError for a chat template that cannot go on behind an answer that calls a tool."""
        assert self._turns is not None, "used as a context"
        ends = [token for token in sampling.stop_ids if self._turns.ends_turn(token)]
        if not ends:
            raise UserError(
                "the chat template ends an answer that calls a tool with no token that ends an answer",
                where="data.chat.template",
                fix="set data.chat.template to another, such as qwen",
            )
        for token in ends:
            self._turns.check(token)

    def _begin(
        self, episodes: Sequence[RunningEpisode], prompts: Sequence[Prompt], max_new_tokens: int
    ) -> None:
        """Resets the environments, and writes the prompts with the tools."""
        assert self._turns is not None, "used as a context"
        for prompt in prompts:
            if prompt.columns.get("tools"):
                raise UserError(
                    f"a row names tools of its own, which no function answers: {prompt.text[:80]!r}",
                    where="data, column tools",
                    fix="remove that column: the model is told of the recipe's tools and environment",
                )
        rows = {
            episode.number: (episode.key, row_of(prompts[episode.completion.prompt]))
            for episode in episodes
        }
        texts = self._tools.reset(rows)
        written = dict[tuple[int, str | None], list[int]]()
        for episode in episodes:
            place = (episode.completion.prompt, texts[episode.number])
            messages = opening(prompts[place[0]], place[1])
            if place not in written:
                written[place] = self._turns.prompt(messages)
            episode.prompt_ids = written[place]
            episode.opening = list(map(as_turn, messages))
            episode.num_earlier = sum(len(message.calls) for message in messages)
            if self._room(episode, max_new_tokens) < 1:
                raise UserError(
                    f"a prompt with its tools has {len(episode.prompt_ids):,} tokens: no room for an answer",
                    where="data.sequence_length",
                    fix=f"set data.sequence_length={len(episode.prompt_ids) + max_new_tokens}",
                )

    def _room(self, episode: RunningEpisode, max_new_tokens: int) -> int:
        """How many tokens its next answer may have."""
        return min(max_new_tokens - len(episode.completion.ids), self._longest - len(episode.ids))

    def _answer(
        self,
        decoder: Decoder,
        playing: Sequence[RunningEpisode],
        sampling: Sampling,
        limits: Sequence[int],
        *,
        slots: int,
        past: Past | None,
        on_step: Callable[[int], None],
    ) -> None:
        assert self._turns is not None

        def uniforms(texts: Sequence[Completion]) -> Tensor:
            """By the episode and the place of the token in it, as for completions of one turn."""
            running = [playing[text.prompt] for text in texts]
            keys = np.array([episode.key for episode in running], dtype=np.uint64)
            places = np.array(
                [
                    len(episode.completion.ids) + len(text.ids)
                    for episode, text in zip(running, texts, strict=True)
                ],
                dtype=np.uint64,
            )
            return torch.from_numpy(uniform_numbers(keys, places))

        answers = sample_completions(
            decoder,
            [episode.ids for episode in playing],
            1,
            sampling,
            uniforms,
            slots=slots,
            limits=limits,
            past=past,
            on_step=on_step,
        )
        for episode, answer in zip(playing, answers, strict=True):
            episode.take_answer(self._turns, answer.ids, answer.logps, truncated=answer.truncated)

    def _call(
        self, calling: Sequence[RunningEpisode], recorded: RecordedCalls, max_new_tokens: int
    ) -> list[RunningEpisode]:
        """Calls what the last answers ask for, and gives the results; returns those that go on.

        Recorded results are read, and others are recorded.
        """
        assert self._turns is not None
        results = dict[int, list[ToolResult | None]]()
        for episode in calling:
            results[episode.number] = [
                recorded.answer(episode.key, episode.turns, place, call)
                for place, call in enumerate(episode.calls)
            ]
        missing = {
            episode.number: [
                call
                for call, result in zip(episode.calls, results[episode.number], strict=True)
                if result is None
            ]
            for episode in calling
        }
        new_calls = {number: calls for number, calls in missing.items() if calls}
        answers = (
            {number: iter(of_episode) for number, of_episode in self._tools.call(new_calls).items()}
            if new_calls
            else {}
        )
        new = list[tuple[int, int, int, ToolCall, ToolResult]]()
        going_on = list[RunningEpisode]()
        for episode in calling:
            tool_results = list[ToolResult]()
            for place, (call, known) in enumerate(
                zip(episode.calls, results[episode.number], strict=True)
            ):
                result = next(answers[episode.number]) if known is None else known
                if known is None:
                    new.append((episode.key, episode.turns, place, call, result))
                tool_results.append(result)
            room = self._room(episode, max_new_tokens)
            if episode.take_results(self._turns, tool_results, room=room):
                going_on.append(episode)
        recorded.add(new)
        return going_on


def _report(on_step: Callable[[int], None], num_over: int, num_done: int) -> None:
    """`num_over`: the episodes that are over before this turn."""
    on_step(num_over + num_done)


def row_of(prompt: Prompt) -> dict[str, Any]:
    """What `reset` is given, as by TRL: the prompt and the other columns of its row."""
    return {"prompt": prompt.text if prompt.messages is None else prompt.messages, **prompt.columns}


def opening(prompt: Prompt, text: str | None) -> list[Message]:
    """The conversation of a prompt; the user's last turn ends with `text`."""
    if prompt.messages is None:
        return opening_messages([Message("user", prompt.text)], text)
    return opening_messages([as_message(turn) for turn in prompt.messages], text)


def opening_messages(turns: Sequence[Message], text: str | None) -> list[Message]:
    """A conversation whose last turn of the user ends with `text`."""
    messages = list(turns)
    if text is None:
        return messages
    if not messages or messages[-1].role != "user":
        return [*messages, Message("user", text)]
    return [*messages[:-1], replace(messages[-1], content=messages[-1].content + text)]


def message_json(content: str, calls: Sequence[ToolCall]) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if calls:
        message["tool_calls"] = [
            {"type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in calls
        ]
    return message
