"""Inference: a model is loaded, texts are decoded, tokens are sampled, and become text.

  load:    held_model (`held_model.py`) -> load_used (`load.py`) -> compile_step, on a CPU (`model/compiled_step.py`)
  decode:  generate, serve, completions -> RunningBatch (`decode.py`) -> Past (`past.py`) -> Cache (`model/cache.py`)
  sample:  each text from its own random numbers, or all rows at once (`sampling.py`; the table in `decode.py`)
  text:    tokens -> OutputText: whole characters, up to a stop text (`text.py`)

Whom it is for: `generate.py` for Python and the commands, `completions.py` for rollouts. What a text may have besides:
a grammar (`grammar.py`, tried in a child process by `grammar_trials.py`), guesses (`speculation.py`), on a GPU Triton's
kernel (`decoding_kernel.py`). `forward.py` is the forward in a run's precision, for evaluation and training too.

Follow a request in docs/contributing/life-of-a-request.md; why it is so: docs/decisions/infer.md.
"""
