"""The child of `scores.py`: judges a checkpoint of a run on held-out items, and answers with a figure of each."""

from pathlib import Path
from typing import TYPE_CHECKING

from bloomery.core.child import Message, accept, loading, reply
from bloomery.core.errors import UserError
from bloomery.core.progress import told_to

if TYPE_CHECKING:
    from bloomery.evals.statistics import Scores


def main() -> None:
    job = accept()
    try:
        with told_to(lambda text: reply(job, {"doing": text})):
            result = _scores(job)
    except UserError as error:
        reply(job, {"error": [error.problem, error.where, error.fix]})
        return
    if result is None:
        reply(job, {"values": None})
        return
    scores, step = result
    answer = {"values": scores.values.tolist(), "weights": scores.weights.tolist(), "step": step}
    reply(job, answer)


def _scores(job: Message) -> "tuple[Scores, int] | None":
    """The scores of the items, and the step of the checkpoint; None where only the run itself can compute them.

    Raises UserError.
    """
    from bloomery.runs.chosen_model import chosen_use

    use = chosen_use(job["devices"])  # sets the environment, before torch is imported
    with loading():
        import numpy as np

        from bloomery.evals.evaluate import load_found
        from bloomery.evals.items import TaskSettings, ask, read_task
        from bloomery.evals.own_losses import losses_as_trained
        from bloomery.evals.rewards import reward_prompts
        from bloomery.evals.statistics import Scores
        from bloomery.evals.tasks import losses_of_texts
        from bloomery.infer.held_model import held_model
        from bloomery.plan.store import read_plan
        from bloomery.train.state import add_tuned_vision

    run = Path(job["run"])
    plan = read_plan(run / "plan.json") if job["metric"] == "reward" else None
    with held_model(run, job["step"]) as files:
        step = int(files.weights.name.rpartition("-")[2])
        if job["metric"] == "own":
            own_scores = losses_as_trained(run, files.weights)
            return None if own_scores is None else (own_scores, step)
        decoder, tokenizer = load_found(files, where=str(run), use=use)
        if plan is not None:
            add_tuned_vision(decoder, plan, files.weights)
    if plan is not None:
        _, rewarded, _ = reward_prompts(decoder, tokenizer, plan, run, None)
        totals = np.array(rewarded.totals, np.float64)
        known = ~np.isnan(totals)  # no reward scored the others
        scores = Scores("reward", np.where(known, totals, 0.0), known.astype(np.float64))
    elif job["metric"] == "task":
        task_scores = ask(decoder, tokenizer, read_task(Path(job["task"])), TaskSettings())
        headline = task_scores.scores[0]
        assert isinstance(headline, Scores), "items of a task file have scores of their own"
        scores = headline
    else:
        losses = losses_of_texts(decoder, tokenizer, Path(job["prepared"]))
        scores = Scores("eval.loss", losses.nats, losses.tokens)
    if not scores.weights.any():
        raise UserError(
            "no item of the run could be scored",
            where=job["prepared"],
            fix="check the rewards of the recipe, and data.validation",
        )
    return scores, step


if __name__ == "__main__":
    main()
