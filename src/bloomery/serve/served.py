"""A model that is served: decoder, tokenizer, chat template, slots; and how it is loaded."""

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor

from bloomery.core.device import sent
from bloomery.core.errors import UserError
from bloomery.data.chat.channels import Channels, channels_of
from bloomery.data.chat.render import ChatFormat, chat_format
from bloomery.data.chat.thoughts import ThoughtFormat, thought_format
from bloomery.data.chat.tool_arguments import Json
from bloomery.data.chat.tool_forms import ToolFormat, call_ends, tool_format
from bloomery.data.examples import Message
from bloomery.data.pictures.encoder import PictureEncoder, VisionSource
from bloomery.data.pictures.processor import PictureProcessor
from bloomery.data.tokenizer.templates import find_template, own_templates
from bloomery.data.tokenizer.tokenizer import Tokenizer, load_tokenizer
from bloomery.facts.config import refuse_values
from bloomery.infer.decode import RunningBatch
from bloomery.infer.grammar import JsonGrammars, JsonText
from bloomery.infer.held_model import held_folder, held_model
from bloomery.infer.load import Use, load_fitting, load_used
from bloomery.infer.model_folder import ModelFiles
from bloomery.infer.past import Past, is_length_independent
from bloomery.infer.picture_prompts import load_eyes, picture_source, tower_parameters
from bloomery.infer.sampling import known_ids
from bloomery.model.adapters.many import Adapters
from bloomery.model.adapters.settings import refuse_other_base
from bloomery.model.cache import Cache
from bloomery.model.compiled_step import compile_step
from bloomery.model.decoder import Decoder
from bloomery.model.heads import Head
from bloomery.serve.limits import Limits
from bloomery.serve.pictures import PictureIntake
from bloomery.serve.tokenizing import Lane, most_bytes
from bloomery.serve.tools import AnswerRules, answer_grammar

PIECE = 256  # tokens of a prompt between two steps of the other texts


@final
class Served:
    """A model with its tokenizer, chat template and slots. `adapters`: by name; None where there are none."""

    def __init__(
        self,
        name: str,
        decoder: Decoder,
        tokenizer: Tokenizer,
        form: ChatFormat | None,
        limits: Limits,
        adapters: Adapters | None = None,
        open_form: Callable[[], ChatFormat] | None = None,
        template: str = "",
        intake: PictureIntake | None = None,
        template_name: str | None = None,
    ) -> None:
        """`open_form` makes a second chat format, for long conversations. `template`: the text of the chat template.
        `template_name`: its name or file; None: it is the tokenizer's own.
        `intake`: reads the pictures of conversations; None: the model reads text alone.
        """
        self.name = name
        self.decoder = decoder
        self.tokenizer = tokenizer
        self.form = form
        self.template = template
        self.template_name = template_name
        self.intake = intake
        self.adapters = adapters
        self.slots = limits.slots
        self.longest = decoder.config.max_positions
        self.context = min(limits.context or self.longest, self.longest)
        # a longer text has more tokens than the context
        self.prompt_bytes = most_bytes(tokenizer, self.context)
        self.ends = known_ids(tokenizer.eos_id, decoder.config.eos_token_id)
        self._open_form = open_form
        # A template is rendered in a child process, one conversation at a time: those of short conversations do not
        # wait for the long ones.
        self._forms: dict[Lane, ChatFormat] = {} if form is None else {"short": form}
        self._rendering: dict[Lane, threading.Lock] = {
            "short": threading.Lock(),
            "long": threading.Lock(),
            "pictures": threading.Lock(),
        }
        self.reset()

    def read_piece(
        self, ids: Sequence[int], *, read: int, cache: Cache, adapter: str | None, head: Head
    ) -> Tensor:
        """The head's output [T, ...] of the next tokens of a text, of which `read` are in the cache."""
        # In a model whose tokens depend on the piece in which they are read, one piece is the text.
        in_pieces = is_length_independent(self.decoder.config)
        piece = ids[read : read + PIECE] if in_pieces else ids
        if self.adapters is not None:
            self.adapters.choose([adapter])
        device = self.decoder.model.embed_tokens.weight.device
        with torch.no_grad():
            tokens = sent(torch.tensor([list(piece)]), device)
            output: Tensor = self.decoder(tokens, head=head, cache=cache).head[0]
        return output

    def reset(self) -> None:
        """Empty slots."""
        set_adapters = None if self.adapters is None else self.adapters.choose
        past = Past(self.decoder, self.slots, self.context, set_adapters)
        self.batch = RunningBatch(past, piece=PIECE)

    @property
    def grammar_ends(self) -> tuple[int, ...]:
        """The tokens with which a grammar may end: the model's own, and those of its chat template."""
        of_template = () if self.form is None else self.form.stop_ids
        return known_ids(*self.ends, *of_template, *self.call_ends)

    def json_text(self, schema: Json) -> JsonText:
        """What keeps a text to JSON of the schema. Raises UserError. For the thread of grammars."""
        return self._grammars.start(schema)

    def answer_text(self, rules: AnswerRules) -> JsonText:
        """What keeps an answer to its tools and its schema. Raises UserError. For the thread of grammars."""
        if rules.schema is not None and not rules.tools and rules.thought is None:
            return self._grammars.start(rules.schema)
        form = self.tools if rules.tools else None
        return self._grammars.follow(answer_grammar(rules, form, self.tokenizer, self.grammar_ends))

    @cached_property
    def tools(self) -> ToolFormat:
        """How the chat template writes calls. Raises UserError where it takes no tools."""
        assert self.form is not None and self.form.render is not None
        with self._rendering["short"]:
            return tool_format(self.form.render)

    @cached_property
    def call_ends(self) -> tuple[int, ...]:
        """The token that the chat template writes behind a call, where it is none that ends other answers."""
        if self.form is None or self.form.render is None:
            return ()
        try:
            form = self.tools
        except UserError:  # without tools
            return ()
        with self._rendering["short"]:
            return call_ends(self.form.render, form, self.tokenizer)

    @cached_property
    def thoughts(self) -> ThoughtFormat | Channels | None:
        """How the chat template marks a thought; None where it has none."""
        return channels_of(self.template) or thought_format(self.template)

    def spelled(self, token: int) -> bytes:
        """The bytes of text that a token stands for, which may be a part of a character."""
        return self.tokenizer.spelled(token)

    @cached_property
    def _grammars(self) -> JsonGrammars:
        return JsonGrammars(self.tokenizer, self.decoder.config.vocab_size, self.grammar_ends)

    def close(self) -> None:
        """Ends the child process that tries grammars, if there is one."""
        if "_grammars" in self.__dict__:
            self._grammars.close()

    def encode_chat(
        self,
        messages: Sequence[Message],
        tools: tuple[Json, ...] = (),
        lane: Lane = "short",
        variables: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """`variables`: what the template gets besides. Turns with pictures go in a lane of their own.

        Raises UserError for turns that the template refuses, and Refused for pictures that cannot be read.
        """
        assert self.form is not None
        with self._rendering[lane]:
            if self.intake is not None and lane == "pictures":
                self.intake.begin()
            if lane not in self._forms:
                self._forms[lane] = self.form if self._open_form is None else self._open_form()
            return self._forms[lane].encode(messages, tools, variables)


def load_served(
    model: Path,
    name: str,
    limits: Limits,
    stack: ExitStack,
    *,
    step: str = "best",
    use: Use | None = None,
    template: str | None = None,
    adapters: Mapping[str, Path] | None = None,
    parts: int = 1,
    on_load: Callable[[str], None],
) -> Served:
    """A model ready to be served. `stack`: closes the child processes of its template and grammars. `parts`: how many
    models share the memory. Raises UserError.
    """
    use = use or Use.local()
    with ExitStack() as holds:
        files = holds.enter_context(held_model(model, step))
        source = readable_source(files, on_load) if limits.pictures else None
        tower = tower_parameters(source)
        if limits.context is None:
            decoder, context = load_fitting(
                files, use, slots=limits.slots, parts=parts, tower=tower, on_load=on_load
            )
            limits = replace(limits, context=context)
        else:
            decoder = load_used(
                files,
                use,
                on_load=on_load,
                cached=(limits.slots, limits.context),
                decodes=True,
                tower=tower,
            )
        refuse_values(decoder.config, where=str(model))
        loaded_adapters = None
        if adapters:
            folders = {
                key: holds.enter_context(held_folder(folder)) for key, folder in adapters.items()
            }
            for folder in folders.values():
                refuse_other_base(folder, files.weights)
            loaded_adapters = Adapters(decoder, folders)
        if source is not None:
            load_eyes(decoder, files, source)
        tokenizer = load_tokenizer(files.tokenizer)

        # Everything is in memory now, but for the image processor, which each chat form reads when it opens.
        if source is not None:
            stack.enter_context(holds.pop_all())
    compile_step(decoder, on_load)
    return serve_loaded(decoder, tokenizer, name, limits, stack, template, loaded_adapters, source)


def readable_source(files: ModelFiles, on_load: Callable[[str], None]) -> VisionSource | None:
    """What reads the pictures of a model; None of one that reads text alone, or whose pictures are not readable, with a
    line.
    """
    source = picture_source(files)
    if source is None:
        return None
    try:
        PictureProcessor(Path(source.folder), source.vision)
    except UserError as error:
        on_load(f"images: refused, because {error.problem}")
        return None
    return source


def serve_loaded(
    decoder: Decoder,
    tokenizer: Tokenizer,
    name: str,
    limits: Limits,
    stack: ExitStack,
    template: str | None = None,
    adapters: Adapters | None = None,
    source: VisionSource | None = None,
) -> Served:
    """`source`: of what the decoder sees; None: it reads text alone. Raises UserError for an unknown template."""
    chats = template is not None or bool(own_templates(tokenizer.config))
    intake = None if source is None or not chats else PictureIntake()

    def open_form() -> ChatFormat:
        pictures = None
        if source is not None and intake is not None:
            pictures = PictureEncoder(source, intake)
        return stack.enter_context(chat_format(tokenizer, template, pictures))

    found = find_template(template, tokenizer.config) if chats else None
    text = "" if found is None else found.text + (found.tool_use or "")
    form = open_form() if chats else None
    served = Served(
        name, decoder, tokenizer, form, limits, adapters, open_form, text, intake, template
    )
    stack.callback(served.close)
    return served
