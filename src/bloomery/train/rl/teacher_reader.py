"""Samples as their teacher reads them, where that is not as the model has them: other prompts, or another tokenizer."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from types import TracebackType
from typing import final

from bloomery.data.chat.render import as_message
from bloomery.data.chat.turns import Turns
from bloomery.data.prompts import Prompt, Prompts
from bloomery.infer.completions import Completion
from bloomery.plan.teacher_tokenizer import refuse_other_calls
from bloomery.train.rl.episodes import EpisodeSampler
from bloomery.train.rl.rollout import RolloutSample
from bloomery.train.rl.teacher_episodes import TeacherEpisodes
from bloomery.train.rl.teacher_prompts import TeacherPrompts
from bloomery.train.rl.teacher_texts import TeacherTexts


@final
class TeacherReader(AbstractContextManager["TeacherReader"]):
    """A context, which ends the process of the teacher's chat template."""

    def __init__(
        self,
        prompts: TeacherPrompts,
        texts: TeacherTexts | None,
        episodes: EpisodeSampler | None,
        *,
        splits: Sequence[Prompts],
        length: int,
    ) -> None:
        """`texts`: of a teacher with another tokenizer; None for one with the same. `episodes`: of several turns, whose
        context is entered before this one. `splits`: the prompts that are checked before the first step. `length`:
        tokens of the teacher's prompt and completion.
        """
        self._prompts = prompts
        self._texts = texts
        self._episodes = episodes
        self._teacher_episodes: TeacherEpisodes | None = None
        self._unchecked = list(splits)
        self._length = length

    @property
    def has_other_tokenizer(self) -> bool:
        return self._texts is not None

    def __enter__(self) -> "TeacherReader":
        """Raises UserError for prompts that cannot be the teacher's, and for tools that it would call another way."""
        if self._episodes is not None:
            turns = Turns(self._prompts.renderer, self._prompts.tokenizer, self._episodes.tools)
            self._prompts.turns = turns
            if self._texts is not None:
                student = self._episodes.turns
                if student.form is not None and turns.form is not None:
                    refuse_other_calls(student.form, turns.form)
                self._teacher_episodes = TeacherEpisodes(
                    self._texts, student=student, teacher=turns
                )
        while self._unchecked:
            self._prompts.check(self._unchecked[0])
            del self._unchecked[0]
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._prompts.__exit__(kind, error, trace)

    def read(
        self,
        samples: Sequence[RolloutSample],
        prompts: Sequence[Prompt],
        completions: Sequence[Completion],
    ) -> list[RolloutSample]:
        """The samples with what their teacher reads. `completions`: of each sample that of one of the `prompts`."""
        # Prompts without an environment are the same for all their completions.
        known = dict[int, tuple[int, ...]]()
        taught = list[RolloutSample]()
        for sample, completion in zip(samples, completions, strict=True):
            number = completion.prompt
            if completion.episode is not None:
                opening = tuple(map(as_message, completion.episode.opening))
                ids = self._prompts.ids_of(prompts[number], opening)
            else:
                if number not in known:
                    known[number] = self._prompts.ids_of(prompts[number])
                ids = known[number]
            sample = replace(sample, teacher_prompt_ids=ids)
            taught.append(self._with_text(sample, completion))
        return taught

    def _with_text(self, sample: RolloutSample, completion: Completion) -> RolloutSample:
        if self._texts is None:
            return sample
        assert sample.teacher_prompt_ids is not None
        room = self._length - len(sample.teacher_prompt_ids)
        if self._teacher_episodes is None or completion.episode is None:
            read = self._texts.read(sample.completion_ids, room=room)
        else:
            read = self._teacher_episodes.read(
                sample.completion_ids,
                sample.given,
                completion.episode.messages,
                room=room,
                num_earlier=sum(
                    len(turn.get("tool_calls", ())) for turn in completion.episode.opening
                ),
            )
        return replace(sample, teacher_completion=read)
