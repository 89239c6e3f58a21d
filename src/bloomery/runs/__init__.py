"""The life of a run, in the parent process that never imports torch.

  start:    lifecycle.start -> new_run, devices, consent -> flow
  resume:   lifecycle.resume -> resume_inputs -> resume_plan -> flow
  run:      flow starts the stages (`launch/supervisor.py`); event_hub writes and shows their events, telemetry reads
            sensors; follow: the ranks that a launcher started
  besides:  chosen_model, which model a command names; cleaning, what can be deleted

Why it is so: docs/decisions/runs.md.
"""
