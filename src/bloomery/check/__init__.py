"""Whether a device computes what the CPU computes, for a step of training.

  compare:  rounding (what rounding explains) -> comparison (a result on both) -> a part, a step, an update
  examine:  small_model -> parts, whole_step, updates -> examination: what differs, by name
  decide:   examination, cures, known_devices -> verdict: the settings to train with, or why not
  when:     run_start before the first step of a run; step_probes and attention_probes for `hardware.probes`

`parts.py` has a table of a step's parts, `attention.py` those of attention; `products.py` is one product whose result
is known, in milliseconds. Why it is so: docs/decisions/check.md.
"""
