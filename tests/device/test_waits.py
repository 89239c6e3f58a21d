"""Where the host waits for the device: the list of waits.toml, measured on the simulated device."""

import base64
import shutil
import tomllib
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import pytest
import simulated
import streamed_experts
import torch
from plans_for_tests import tiny_config, tiny_plan
from rollouts_for_tests import plan_of, write_recipe
from runs_of_the_loop import CONFIG, prepared_corpus
from structured_runs import write_answers

from bloomery.core.device import multiplies_groups
from bloomery.data.chat.render import chat_format
from bloomery.data.examples import PICTURE, Message
from bloomery.data.tokenizer.tokenizer import load_tokenizer
from bloomery.facts.config import Experts
from bloomery.infer.decode import RunningBatch
from bloomery.infer.load import Use, load_used
from bloomery.infer.model_folder import find_model
from bloomery.infer.past import Past
from bloomery.infer.picture_prompts import open_eyes
from bloomery.infer.sampling import Sampling
from bloomery.model.configs import read_config
from bloomery.model.decoder import Decoder
from bloomery.model.io.weights import fresh_decoder, model_state, write_model
from bloomery.monitor.events import StepDone
from bloomery.plan.types import RouterPlan, RunPlan, VisionPlan
from bloomery.recipe.objectives import Distill, Kto, Preference, Sft
from bloomery.recipe.schema import Lora, NoAdapter
from bloomery.train import loop
from bloomery.train import step as step_module
from bloomery.train.evaluation import evaluation
from bloomery.train.objectives.losses import LossParts
from bloomery.train.optim.build import build_optimizer
from pictures_for_tests import BLUE, RED, TEXT, png, prepared_rows, row, save_base

LISTED = tomllib.loads((Path(__file__).parent / "waits.toml").read_text())
PLAIN = CONFIG.__class__(**vars(CONFIG) | {"residual_dropout": 0.0})
MIXTURE = CONFIG.__class__(
    **vars(PLAIN) | {"family": "qwen3_moe", "experts": Experts(count=4, per_token=2, width=16)}
)
LORA = Lora(kind="lora", rank=4, target_modules=["q_proj", "down_proj"])
NEVER = 1000
# The others are for `make soak`.
QUICK = {
    "4 micro-batches",
    "blockwise, attention dropout",
    "fused into backward",
    "streamed full, 4 micro-batches",
    "kto",
    "distill",
    "experts",
    "experts, balanced",
    "grpo",
    "pictures, qwen3_vl",
}


def waits() -> dict[str, int]:
    """By place, of all operators, since the last call."""
    by_place = Counter[str]()
    for (_operator, place), count in simulated.waits().items():
        by_place[place] += count
    simulated.clear()
    return dict(by_place)


class Folders:
    """What the runs read, written once."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.text = prepared_corpus(root)
        self.base = root / "base"
        self.base.mkdir()
        write_model(model_state(fresh_decoder(CONFIG, seed=3)), CONFIG, self.base)
        for path in self.text.glob("*tokenizer*.json"):
            shutil.copy(path, self.base)

    def answers(self, kind: str) -> Path:
        folder = self.root / kind
        return folder if folder.exists() else write_answers(folder, self.text, kind)

    def pictures(self, kind: str) -> Path:
        """Of conversations with two pictures, for a model of that kind in `base`."""
        folder = self.root / kind
        if not folder.exists():
            folder.mkdir()
            rows = [row(RED, TEXT, answer="red"), row(BLUE, TEXT, answer="blue")] * 8
            prepared_rows(folder, rows, kind=kind, weights=True)
        return folder

    def prompts(self) -> Path:
        folder = self.root / "prompts"
        if not folder.exists():
            folder.mkdir()
            write_recipe(folder)
        return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    return Folders(tmp_path_factory.mktemp("waits"))


def on_device(plan: RunPlan, **train: object) -> RunPlan:
    """Four steps, without an evaluation or a checkpoint between them."""
    sections: dict[str, dict[str, object]] = {
        "train": {"device": "cuda", "steps": 4, "deterministic": False, **train},
        "data": {"pin_memory": True},
        "memory": {"limit": 4 * 2**30},
        "checkpoint": {"every_steps": NEVER},
        "eval": {"every_steps": NEVER},
        "logging": {"every_steps": NEVER},
    }
    return plan.model_copy(
        update={
            name: getattr(plan, name).model_copy(update=changes)
            for name, changes in sections.items()
        }
    )


def tiny(
    folder: Path,
    *,
    objective: object = None,
    adapter: object = None,
    train: dict[str, object] | None = None,
    config: object = PLAIN,
    **sections: object,
) -> RunPlan:
    plan = tiny_plan(folder, config=config, **sections)
    given = {"objective": objective, "adapter": adapter}
    changes = {name: value for name, value in given.items() if value is not None}
    return on_device(plan.model_copy(update=changes), **(train or {}))


def reported(plan: RunPlan) -> RunPlan:
    """Every step has the load of each expert, and the sizes of its updates."""
    logging = plan.logging.model_copy(update={"every_steps": 1})
    return plan.model_copy(update={"logging": logging})


def with_pictures(folder: Path, *, trained: bool) -> RunPlan:
    """Four micro-batches of one picture. `trained`: all weights are, instead of LoRA on the language model."""
    plan = tiny(
        folder / "prepared-stop",
        adapter=NoAdapter() if trained else LORA,
        config=read_config(folder / "base"),
        model={"source": folder / "base"},
        data={"sequence_length": 256, "layout": "padded"},
        train={"micro_batch_size": 1, "accumulation": 4, "tokens_per_step": 1024},
    )
    return plan.model_copy(update={"vision": VisionPlan(train="all" if trained else "none")})


ONE = {"accumulation": 1, "tokens_per_step": 64}
FOUR = {"accumulation": 4, "tokens_per_step": 256}
STREAMED = {"stream": "layers", "activation_checkpointing": "full"}
BLOCKWISE = CONFIG.__class__(**vars(CONFIG) | {"attention_dropout": 0.1})
SECOND_STEP = ("objective.num_iterations=2", "objective.beta=0.1")
PPO = "objective={kind: ppo, num_generations: 1, max_completion_length: 8, num_iterations: 2}"
STEPS: dict[str, Callable[[Folders], RunPlan]] = {
    "1 micro-batch": lambda f: tiny(f.text, train=ONE),
    "4 micro-batches": lambda f: tiny(f.text, train=FOUR),
    "math": lambda f: tiny(f.text, model={"attention": "math"}),
    "blockwise, attention dropout": lambda f: tiny(
        f.text, config=BLOCKWISE, model={"attention": "blockwise"}
    ),
    "float16, clipped, averaged": lambda f: tiny(
        f.text, train={"precision": "float16", "max_grad_norm": 0.01, "ema_decay": 0.9}
    ),
    **{
        f"checkpointing {mode}": lambda f, mode=mode: tiny(
            f.text, train={"activation_checkpointing": mode}
        )
        for mode in ("full", "selective", "every-2")
    },
    "offloaded activations": lambda f: tiny(
        f.text, train={"activation_checkpointing": "full", "offload_activations": True}
    ),
    "unfused": lambda f: tiny(f.text, optimizer={"fused": False}),
    "int8 states": lambda f: tiny(f.text, optimizer={"state_dtype": "int8"}),
    "muon": lambda f: tiny(f.text, optimizer={"kind": "muon"}),
    "adafactor": lambda f: tiny(f.text, optimizer={"kind": "adafactor"}),
    "fused into backward": lambda f: tiny(
        f.text, optimizer={"kind": "adafactor", "fused_backward": True}, train=ONE
    ),
    "measured": lambda f: tiny(f.text, train={"steps": 3}),
    "experts": lambda f: tiny(f.text, config=MIXTURE, train=ONE),
    "experts, balanced": lambda f: reported(
        tiny(f.text, config=MIXTURE, train={"router": RouterPlan(loss=0.01, z_loss=0.01)})
    ),
    "lora": lambda f: tiny(f.text, config=CONFIG, model={"source": f.base}, adapter=LORA),
    **{
        f"streamed {case}": lambda f, train=train: tiny(f.text, train=STREAMED | train)
        for case, train in {"full": ONE, "full, 4 micro-batches": FOUR}.items()
    },
    **{
        f"streamed lora{micro_batches}": lambda f, train=train: tiny(
            f.text,
            config=CONFIG,
            model={"source": f.base},
            adapter=LORA,
            train=STREAMED | train,
        )
        for micro_batches, train in {"": ONE, ", 4 micro-batches": FOUR}.items()
    },
    **{
        f"pictures, {kind}": lambda f, kind=kind: with_pictures(f.pictures(kind), trained=False)
        for kind in ("gemma3", "qwen2_5_vl", "qwen3_vl", "smolvlm")
    },
    "pictures, all is trained": lambda f: with_pictures(f.pictures("qwen3_vl"), trained=True),
    "sft": lambda f: tiny(f.answers("chat"), objective=Sft(kind="sft")),
    "dpo": lambda f: tiny(f.answers("pairs"), objective=Preference(kind="dpo", beta=0.5)),
    "kto": lambda f: tiny(f.answers("kto"), objective=Kto(kind="kto", beta=0.5)),
    "distill": lambda f: tiny(
        f.text, config=CONFIG, objective=Distill(kind="distill", teacher=str(f.base))
    ),
    "grpo": lambda f: on_device(plan_of(f.prompts())),
    "grpo, second step of a rollout": lambda f: on_device(plan_of(f.prompts(), *SECOND_STEP)),
    "ppo, second step of a rollout": lambda f: on_device(plan_of(f.prompts(), PPO)),
}


def waits_of_last_step(plan: RunPlan, run_dir: Path) -> dict[str, int]:
    """Everything that the loop does from the end of the step before it on."""
    by_step: dict[int, dict[str, int]] = {}

    def emit(event: object) -> None:
        if isinstance(event, StepDone):
            by_step[event.step] = waits()

    run_dir.mkdir(exist_ok=True)
    loop.run(plan, run_dir=run_dir, emit=emit, stop=lambda: False)
    return by_step[plan.train.steps]


def shared(names: Iterable[str]) -> list[object]:
    return [
        pytest.param(name, marks=[] if name in QUICK else pytest.mark.soak, id=name)
        for name in names
    ]


def test_every_listed_place_says_why() -> None:
    sections = [LISTED[name] for name in LISTED if name != "why"]
    places = {place for section in sections for listed in section.values() for place in listed}
    assert places == LISTED["why"].keys()
    assert STEPS.keys() == LISTED["step"].keys()


@pytest.mark.parametrize("name", shared(STEPS))
def test_a_step_waits_where_the_list_says(name: str, folders: Folders, tmp_path: Path) -> None:
    expected = LISTED["step"][name]
    if multiplies_groups("cuda"):
        # The simulated kernel is the CPU's, which reads where the groups end. CUDA's reads it on the device.
        places = {"model/experts.py spans": "model/experts.py group_product"}
        expected = {places.get(place, place): count for place, count in expected.items()}
    assert waits_of_last_step(STEPS[name](folders), tmp_path) == expected


def test_a_wait_of_every_micro_batch_is_noticed(
    folders: Folders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = step_module.compute_losses

    def waiting(*arguments: object, **settings: object) -> list[LossParts]:
        all_parts = plain(*arguments, **settings)
        assert all(parts.total.item() > 0 for parts in all_parts)
        return all_parts

    monkeypatch.setattr(step_module, "compute_losses", waiting)
    found = waits_of_last_step(STEPS["4 micro-batches"](folders), tmp_path)
    assert found == {"train/step.py train_step": 1, "train/step.py StepPasses.forward_all": 4}


def test_an_evaluation_waits_at_its_end(
    folders: Folders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = evaluation.validation_result
    found = []

    def measured(*arguments: object, **settings: object) -> object:
        waits()
        result = plain(*arguments, **settings)
        found.append(waits())
        return result

    monkeypatch.setattr(evaluation, "validation_result", measured)
    for micro_batch_size in (1, 8):
        plan = tiny(folders.text, train={"steps": 1})
        sizes = {"every_steps": 1, "micro_batch_size": micro_batch_size, "sequences": 8}
        plan = plan.model_copy(update={"eval": plan.eval.model_copy(update=sizes)})
        waits_of_last_step(plan, tmp_path / str(micro_batch_size))
    assert found == [LISTED["evaluation"]["of any number of batches"]] * 2


EIGHT_EXPERTS = {"family": "qwen3_moe", "experts": Experts(count=8, per_token=2, width=16)}
WINDOW = {"sliding_window": (8, 8)}
TEXTS = {
    "one text": ({}, [3]),
    "texts of several lengths": ({}, [3, 4, 6]),
    "a window": (WINDOW, [3, 4, 6]),
    "experts on the host": (EIGHT_EXPERTS, [3]),
}


def waits_of_eight_tokens(decoder: Decoder, prompts: Sequence[Iterable[int]]) -> dict[str, int]:
    """Of those after the first ones, of texts that are decoded together."""

    def waits_of(num_tokens: int) -> Counter[str]:
        batch = RunningBatch(Past(decoder, len(prompts), 128))
        for prompt in prompts:
            batch.add(prompt, Sampling(max_new_tokens=num_tokens))
        waits()
        while batch.texts:
            list(batch.step())
        return Counter(waits())

    waits_of(2)  # what is made once, such as frequencies on the device
    more = waits_of(12)
    more.subtract(waits_of(4))
    return {place: count for place, count in more.items() if count}


@pytest.mark.parametrize("name", TEXTS)
def test_a_token_waits_where_the_list_says(name: str) -> None:
    changes, lengths = TEXTS[name]
    if changes is EIGHT_EXPERTS:
        decoder = streamed_experts.decoder_of(tiny_config(**changes)).eval()
    else:
        decoder = fresh_decoder(tiny_config(**changes), seed=0).to("cuda").eval()
    prompts = [range(1, length + 1) for length in lengths]
    expected = {place: 8 * count for place, count in LISTED["token"][name].items()}
    assert waits_of_eight_tokens(decoder, prompts) == expected


def test_a_token_after_a_picture_waits_as_any_other(tmp_path: Path) -> None:
    """Its positions have three axes."""
    save_base("qwen3_vl", tmp_path / "base", weights=True)
    files = find_model(tmp_path / "base")
    decoder = load_used(files, Use("cuda"), decodes=True)
    encoder = open_eyes(decoder, files)
    picture = "data:image/png;base64," + base64.b64encode(png()).decode()
    with chat_format(load_tokenizer(tmp_path / "base"), None, encoder) as form:
        prompt = form.encode([Message("user", f"{PICTURE}Color?", pictures=(picture,))])
        expected = {place: 8 * count for place, count in LISTED["token"]["one text"].items()}
        assert waits_of_eight_tokens(decoder, [prompt]) == expected


def test_a_save_waits_once_for_the_step_counts_of_all_parameters() -> None:
    decoder = fresh_decoder(tiny_config(), seed=0).to("cuda")
    optimizer = build_optimizer(decoder, tiny_plan().optimizer)
    for parameter in optimizer.parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step(1.0)
    waits()
    scalars = optimizer.scalars()
    assert waits() == LISTED["save"]["step counts of fused AdamW"]
    assert set(scalars.values()) == {1.0} and len(scalars) == len(optimizer.parameters) > 10
