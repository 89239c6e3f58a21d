"""Runs of the loop with one thing broken, from outside: the loader, the objective or the optimizer of this process."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from plans_for_tests import tiny_config, tiny_plan
from runs_of_the_loop import Run

from bloomery.data.batch import Batch
from bloomery.data.loader import Loader
from bloomery.monitor.diagnosis import why_not_learning, why_slow
from bloomery.monitor.events import StepDone
from bloomery.monitor.history import history_of
from bloomery.train import set_up
from bloomery.view.planned_figures import diagnosis_facts

STEPS = 200
# a step of four sequences takes less time than two of two
ONE_PIECE = {"micro_batch_size": 4, "accumulation": 1}
Change = Callable[[Batch], Batch]


def healthy_plan(prepared: Path, **sections):
    """The tiny model on the tiny corpus: two hundred steps of 128 tokens."""
    plain = {
        "eval": {"every_steps": 1000},
        "checkpoint": {"every_steps": 1000},
        "logging": {"every_steps": 10},
    }
    given = {"config": tiny_config(vocab_size=300, num_layers=1)} | plain | sections
    return tiny_plan(
        prepared, **given | {"train": {"steps": STEPS, **ONE_PIECE} | sections.get("train", {})}
    )


def said(plan, folder: Path) -> tuple[str, ...]:
    """What is said of a run of this plan, slow causes first."""
    events = Run(plan, folder).events
    assert any(isinstance(event, StepDone) for event in events)
    history, facts = history_of(events), diagnosis_facts(plan, None)
    return tuple(map(str, (*why_slow(history, facts), *why_not_learning(history, facts))))


def labels_own(batch: Batch) -> Batch:
    return replace(batch, labels=batch.tokens)


def labels_after(batch: Batch) -> Batch:
    """Each label is the token after the next; the last two positions of a document are not learned."""
    labels = torch.roll(batch.labels, -1, 1)
    same = torch.roll(batch.documents, -1, 1) == batch.documents
    loss_mask = batch.loss_mask * same * torch.roll(batch.loss_mask, -1, 1)
    loss_mask[:, -1] = 0
    return replace(batch, labels=labels, loss_mask=loss_mask)


def all_masked(batch: Batch) -> Batch:
    return replace(batch, loss_mask=torch.zeros_like(batch.loss_mask))


def shuffled_tokens(batch: Batch) -> Batch:
    """The tokens of a row in an order of chance, labels made from that order."""
    order = torch.randperm(
        batch.tokens.shape[1], generator=torch.Generator().manual_seed(int(batch.tokens.sum()))
    )
    stream = torch.cat([batch.tokens, batch.labels[:, -1:]], 1)
    tokens = stream[:, order]
    labels = torch.cat([tokens[:, 1:], stream[:, -1:]], 1)
    return replace(batch, tokens=tokens, labels=labels)


def shuffled_inputs(batch: Batch) -> Batch:
    """Tokens in an order of chance under labels that stayed."""
    order = torch.randperm(batch.tokens.shape[1], generator=torch.Generator().manual_seed(0))
    return replace(batch, tokens=batch.tokens[:, order])


def through_the_loader(monkeypatch, change: Change) -> None:
    read = Loader.batch
    monkeypatch.setattr(
        Loader, "batch", lambda *words, **settings: change(read(*words, **settings))
    )


def through_the_objective(monkeypatch, change: Change) -> None:
    made = set_up.build_objective

    def broken(plan, **rest):
        sound = made(plan, **rest)
        return replace(sound, head=lambda batch: sound.head(change(batch)))

    monkeypatch.setattr(set_up, "build_objective", broken)


def frozen_blocks(monkeypatch) -> None:
    """requires_grad is off inside the blocks, from before the optimizer is built."""
    build = set_up.build_state

    def broken(plan, **rest):
        state = build(plan, **rest)
        for name, parameter in state.model_and_optimizer.model.named_parameters():
            if ".layers." in name:
                parameter.requires_grad_(False)
        return state

    monkeypatch.setattr(set_up, "build_state", broken)


def deaf_optimizer(monkeypatch) -> None:
    """Gradients come, and nothing moves."""
    from bloomery.train.optim.build import OptimizersContainer

    monkeypatch.setattr(OptimizersContainer, "step", lambda self, lr_scale, **_: None)
