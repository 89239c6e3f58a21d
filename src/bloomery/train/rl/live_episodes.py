"""Episodes of a conversation with a person or a client: the same turns, tools and limits as in training.

`bloomery serve` and `bloomery chat` decode the answers; what follows each of them is decided here.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, final

from bloomery.core.errors import UserError
from bloomery.data.chat.render import Renderer
from bloomery.data.chat.tool_arguments import Json
from bloomery.data.chat.tools import ToolCall
from bloomery.data.chat.turns import Turns
from bloomery.data.examples import Message
from bloomery.data.tokenizer.tokenizer import Tokenizer
from bloomery.infer.completions import Completion
from bloomery.plan.types import EpisodesPlan
from bloomery.train.rl.episodes import RunningEpisode
from bloomery.train.rl.tools import ToolResult, Tools

NUMBER = 0  # of the episode in the process of its tools, which plays no other


@final
class LiveEpisode:
    """One conversation with tools at a time; `close` ends their process and that of the chat template.

    `stopped` may be set by another thread: a call that is waited for then raises Stopped. `history`: answers and
    results since the user has spoken, for a conversation that goes on.
    """

    def __init__(self, plan: EpisodesPlan) -> None:
        self.stopped = False
        self._tools = Tools(plan, stop=lambda: self.stopped)
        self._max_turns = plan.max_turns
        self._turns: dict[tuple[int, str | None], tuple[Renderer, Turns]] = {}
        self._has_environment = plan.environment.is_set
        self._place = plan.environment.place or "tools"
        self._episode = RunningEpisode(NUMBER, Completion(0, 0), 0)
        self.called = list[tuple[ToolCall, ToolResult]]()  # of the last answer
        self._of_template: Turns | None = None
        self._variables: Mapping[str, Any] = {}
        self.history: list[Message] = []

    @property
    def schemas(self) -> tuple[Json, ...]:
        """What the model is told of the tools. Raises UserError for a file that cannot be loaded."""
        return tuple(self._tools.schemas)

    @property
    def notes(self) -> list[str]:
        """What the user should know of the tools, once they have started."""
        return self._tools.notes

    def close(self) -> None:
        self._tools.close()
        for renderer, _ in self._turns.values():
            renderer.close()
        self._turns.clear()

    def use_template(self, tokenizer: Tokenizer, template: str | None) -> tuple[int, ...]:
        """Chooses the chat template of the conversation; returns the tokens that end an answer which calls a tool.

        Raises UserError for one without tools, for one that cannot go on behind the result of a tool, and for a task
        set, which has no tool.
        """
        if not self.schemas:
            raise UserError(
                "a task set rewards answers to its own prompts, and has no tool",
                where=self._place,
                fix="bloomery eval MODEL --environment FILE:CLASS --data FILE scores a model on it",
            )
        template_key = (id(tokenizer), template)
        if template_key not in self._turns:
            renderer = Renderer(tokenizer, template=template, train_on="assistant")
            turns = Turns(renderer, tokenizer, self.schemas)
            if not turns.call_ends:
                raise UserError(
                    "the chat template ends an answer that calls a tool with no token",
                    where=renderer.template.origin,
                    fix="choose another template, such as --template qwen",
                )
            for token in turns.call_ends:
                turns.check(token)
            self._turns[template_key] = renderer, turns
        _, turns = self._turns[template_key]
        self._of_template = turns
        return turns.call_ends

    def begin(self, row: Json, *, seed: int) -> str | None:
        """Begins an episode: the text that the environment ends the user's turn with. Raises UserError and Stopped.

        `row`: what `reset` of an environment is given.
        """
        return self._tools.reset({NUMBER: (seed, row)})[NUMBER]

    def begin_answer(
        self,
        ids: Sequence[int],
        variables: Mapping[str, Any] | None = None,
        *,
        num_earlier: int = 0,
    ) -> None:
        """The user has spoken: `ids` are what the model answers to, `variables` those of the chat template.

        `num_earlier`: calls in the conversation so far.
        """
        self._episode = RunningEpisode(NUMBER, Completion(0, 0), 0)
        self._episode.num_earlier = num_earlier
        self._episode.prompt_ids = list(ids)
        self._variables = variables or {}
        self.history = []

    def go_on(self, ids: Sequence[int], *, truncated: bool, longest: int) -> list[int] | None:
        """Calls what an answer of `ids` calls; all that the model goes on from, None where the answer was the last.

        `truncated`: no token ended it. `longest`: tokens of the conversation. Raises UserError and Stopped.
        """
        turns = self._of_template
        assert turns is not None, "a template was chosen"
        episode = self._episode
        episode.take_answer(turns, list(ids), [0.0] * len(ids), truncated=truncated)
        calls = tuple(map(_call_of_history, episode.calls))
        self.history.append(Message("assistant", episode.messages[-1]["content"], calls=calls))
        if not episode.is_calling(turns) or episode.turns >= self._max_turns:
            return None
        results = self._tools.call({NUMBER: episode.calls})[NUMBER]
        self.called = list(zip(episode.calls, results, strict=True))
        room = longest - len(episode.ids)
        if not episode.take_results(turns, results, room=room, variables=self._variables):
            return None
        self.history += [
            Message("tool", result.text, name=call.name, call_id=call.id)
            for call, result in zip(episode.calls, results, strict=True)
        ]
        return episode.ids

    @property
    def messages(self) -> list[Json]:
        """Answers and results since the user has spoken."""
        return self._episode.messages

    @property
    def is_cut(self) -> bool:
        """Whether its last answer calls tools that were not called, for want of turns or of room."""
        return bool(self._episode.calls) and self.messages[-1]["role"] == "assistant"

    def summary(self) -> Json:
        """Turns, calls, and the reward of the environment so far. Raises UserError for a reward that fails."""
        episode = self._episode
        reward = self._tools.rewards([NUMBER])[0] if self._has_environment else None
        counts = {
            "turns": episode.turns,
            "calls": episode.num_calls,
            "failed_calls": episode.num_failed,
        }
        return counts if reward is None else {**counts, "reward": reward}

    def end(self) -> None:
        """Ends the processes of the episode's tools."""
        self._tools.forget([NUMBER])


def _call_of_history(call: ToolCall) -> Json:
    """A call as chat templates take it. Arguments that were no JSON object are none."""
    try:
        arguments = json.loads(call.arguments)
    except (ValueError, RecursionError):
        arguments = {}
    function = {"name": call.name, "arguments": arguments if isinstance(arguments, dict) else {}}
    return {"id": call.id, "type": "function", "function": function}
