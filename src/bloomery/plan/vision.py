"""What a recipe trains of the parts that read pictures: its rates, and what contradicts it."""

from collections.abc import Iterator

from bloomery.core import Choice
from bloomery.core.errors import UserError
from bloomery.facts.rates import Rates, rate_text
from bloomery.plan.types import RunPlan, VisionPlan
from bloomery.recipe.rewards import ModelReward
from bloomery.recipe.schema import Lora, NoAdapter, Recipe, VisionParts

# LLaVA-1.5's projector, alone and beside LoRA (arXiv:2310.03744, table 9; its finetune_task_lora.sh), and
# LLaVA-OneVision's tower (arXiv:2408.03326, table 1).
PROJECTOR_ALONE = Rates(5e-4, 2e-3, 1e-3)
PROJECTOR_BESIDE_ADAPTER = 2e-5
TOWER = Rates(1e-6, 1e-5, 2e-6)


def has_tower(parts: VisionParts) -> bool:
    return parts in ("tower", "all")


def has_projector(parts: VisionParts) -> bool:
    return parts in ("projector", "all")


def adapted_parts(recipe: Recipe) -> VisionParts:
    """Those with LoRA."""
    return recipe.adapter.vision if isinstance(recipe.adapter, Lora) else "none"


def trains_vision(recipe: Recipe) -> bool:
    return recipe.vision.train != "none" or adapted_parts(recipe) != "none"


def vision_plan(recipe: Recipe) -> VisionPlan:
    """`recipe`: with a number as its optimizer's learning rate."""
    section = recipe.vision
    common_rate = recipe.optimizer.learning_rate
    assert common_rate != "auto", "with_usual_values was not called"
    tower_rate = section.learning_rate
    if tower_rate == "auto":
        is_alone = section.freeze_language_model and section.train == "tower"
        in_full = has_tower(section.train) and not is_alone
        tower_rate = TOWER.start if in_full else common_rate
    projector_rate = section.projector_learning_rate
    if projector_rate == "auto":
        has_adapter = not isinstance(recipe.adapter, NoAdapter)
        is_beside = has_adapter and has_projector(section.train)
        projector_rate = PROJECTOR_BESIDE_ADAPTER if is_beside else common_rate
    return VisionPlan(
        train=section.train,
        learning_rate=tower_rate,
        projector_learning_rate=projector_rate,
        freeze_language_model=section.freeze_language_model,
    )


def vision_choices(recipe: Recipe) -> Iterator[tuple[str, Choice[str]]]:
    """By key, where the recipe trains any of these parts."""
    plan = vision_plan(recipe)
    adapted = adapted_parts(recipe)
    for key, parts in (("vision.train", plan.train), ("adapter.vision", adapted)):
        if parts == "none":
            continue
        rates = []
        if has_projector(parts):
            rates.append(f"projector at {rate_text(plan.projector_learning_rate)}")
        if has_tower(parts):
            rates.append(f"tower at {rate_text(plan.learning_rate)}")
        how = "in full" if key == "vision.train" else "LoRA on every linear map"
        rest = "; the language model is frozen" if plan.freeze_language_model else ""
        yield key, Choice(", ".join(rates), f"{how}{rest}")


def refuse_vision_misfits(recipe: Recipe) -> None:
    """Raises UserError for keys of `vision` and `adapter.vision` that contradict others."""
    section = recipe.vision
    adapted = adapted_parts(recipe)
    if section.freeze_language_model and section.train == "none":
        raise UserError(
            "nothing is trained",
            where="vision.freeze_language_model",
            fix="set vision.train=projector, or vision.freeze_language_model=false",
            code=2,
        )
    if section.freeze_language_model and not isinstance(recipe.adapter, NoAdapter):
        raise UserError(
            "an adapter trains the language model, which is to be frozen",
            where="vision.freeze_language_model",
            fix="set adapter.kind=none, or vision.freeze_language_model=false",
            code=2,
        )
    for name, has_part in (("projector", has_projector), ("tower", has_tower)):
        if has_part(section.train) and has_part(adapted):
            raise UserError(
                f"the {name} is both adapted and trained in full",
                where="adapter.vision",
                fix="name it there or in vision.train",
                code=2,
            )
    if not trains_vision(recipe):
        rates = {
            "learning_rate": section.learning_rate,
            "projector_learning_rate": section.projector_learning_rate,
        }
        for key, rate in rates.items():
            if rate != "auto":
                raise UserError(
                    "nothing that reads pictures is trained, so that this rate has no effect",
                    where=f"vision.{key}",
                    fix="set vision.train=projector, or leave the rate out",
                    code=2,
                )
        return
    for edit, reason, fix in _excluded(recipe):
        raise UserError(
            f"not supported while what reads pictures is trained: {reason}",
            where=edit,
            fix=f"set {fix}, or leave out vision.train and adapter.vision",
            code=2,
        )


def _excluded(recipe: Recipe) -> Iterator[tuple[str, str, str]]:
    """What the recipe sets beside: its key, what it is, and another value."""
    adapter = recipe.adapter
    spec = recipe.objective.spec
    if recipe.objective.kind == "distill" or spec.samples or spec.reference:
        key = f"objective.kind={recipe.objective.kind}"
        yield key, "a reference, a teacher or rollouts", "objective.kind=sft"
    if not isinstance(adapter, NoAdapter | Lora):
        yield "adapter.kind=peft", "PEFT's other methods", "adapter.kind=lora"
    if isinstance(adapter, Lora) and adapter.vision != "none":
        if adapter.kind != "lora":
            yield f"adapter.kind={adapter.kind}", "DoRA on them", "adapter.kind=lora"
        if adapter.init != "default":
            yield f"adapter.init={adapter.init}", "PiSSA on them", "adapter.init=default"
    if recipe.optimizer.fused_backward:
        key = "optimizer.fused_backward"
        yield key, "an update during backward", "optimizer.fused_backward=false"


def refuse_without_pictures(recipe: Recipe) -> None:
    """Raises UserError where the recipe trains what reads pictures: its dataset has none."""
    if not trains_vision(recipe):
        return
    key = "vision.train" if recipe.vision.train != "none" else "adapter.vision"
    raise UserError(
        "the dataset has no pictures, from which a tower or a projector could learn",
        where=key,
        fix=f"set {key}=none, or name a dataset with pictures",
        code=2,
    )


def refuse_pictures(plan: RunPlan) -> None:
    """Raises UserError for a plan whose pictures would not reach every forward."""
    train = plan.train
    kind = plan.objective.spec.kind
    # A checkpoint of the whole model has no place for the head of a reward model.
    gives_values = plan.objective.spec.values and isinstance(plan.adapter, NoAdapter)
    reads_text = any(isinstance(each, ModelReward) for each in plan.rewards)
    # Their gradients would be on the host and on the device.
    trains_text = isinstance(plan.adapter, NoAdapter) and not plan.vision.freeze_language_model
    trains_both = trains_text and plan.vision.train != "none"
    excluded = {
        f"objective.kind={kind} without an adapter": (gives_values, "set adapter={kind: lora}"),
        "tools": (plan.episodes is not None, "set tools=[] and environment.python=null"),
        "a reward model, which reads text": (reads_text, "score with functions or verifiers"),
        "parallel.pipeline": (train.pipeline > 1, "set parallel.pipeline=1"),
        "parallel.context": (train.context > 1, "set parallel.context=1"),
        "parallel.scoring_devices": (train.scoring_devices > 0, "set parallel.scoring_devices=0"),
        "parallel.stream of trained weights beside a tower that is trained": (
            train.stream != "off" and trains_both,
            "set adapter={kind: lora}",
        ),
    }
    for key, (is_excluded, fix) in excluded.items():
        if is_excluded:
            raise UserError(
                f"not supported with pictures: {key}",
                where=str(plan.data.prepared),
                fix=f"{fix}, or remove the pictures",
            )
