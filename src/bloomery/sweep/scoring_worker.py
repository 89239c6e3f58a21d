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
            scores, step = _scores(job)
    except UserError as error:
        reply(job, {"error": [error.problem, error.where, error.fix]})
        return
    answer = {"values": scores.values.tolist(), "weights": scores.weights.tolist(), "step": step}
    reply(job, answer)


def _scores(job: Message) -> "tuple[Scores, int]":
    """The scores of the items that have a weight, and the step of the checkpoint. Raises UserError."""
    from bloomery.runs.chosen_model import chosen_use

    use = chosen_use(job["devices"])  # sets the environment, before torch is imported
    with loading():
        from bloomery.evals.evaluate import load_found
        from bloomery.evals.statistics import Scores
        from bloomery.evals.tasks import losses_of_texts
        from bloomery.infer.model_folder import find_model

    run = Path(job["run"])
    files = find_model(run, job["step"])
    step = int(files.weights.name.rpartition("-")[2])
    decoder, tokenizer = load_found(files, where=str(run), use=use)
    losses = losses_of_texts(decoder, tokenizer, Path(job["prepared"]))
    scored = losses.tokens > 0
    if not scored.any():
        problem = "the validation set has no token to score"
        raise UserError(problem, where=job["prepared"], fix="set a larger data.validation")
    return Scores("eval.loss", losses.nats[scored], losses.tokens[scored]), step


if __name__ == "__main__":
    main()
