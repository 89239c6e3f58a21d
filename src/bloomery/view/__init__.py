"""The one reader of a run, and what terminals draw of it. No torch.

  events.jsonl -> Tail -> groups -> RunView{RunSummary, RunCurves, incidents} -> terminal, studio, report, metrics.json

A group is one event, or consecutive steps by field (`StepColumns`). `RunReader` adds them to a `RunView`: its `read`
returns what is new and the status, for `bloomery watch` and each open run of studio; its `read_all` takes the whole of
a run once and keeps the events, for the report. Where a figure is enough there is no view: `summary_of` gives the
`RunSummary` of any events, for `bloomery runs`, metrics.json, and the list of runs in studio, which reads only the two
ends of a file. The process that trains adds each event as it emits it, to the same view or summary (`terminal.py`).

A figure goes into `RunSummary` if a list of runs or metrics.json needs it, else into `RunView`. What has a value at
every step is a curve. What a later resume or rewind discards is decided in `RunSummary._go_back` and `CurveTable.cut`.
"""
