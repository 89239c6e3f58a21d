"""A child that replies the steps of LEARNING instead of measuring."""

import json
import os

from bloomery.core.child import accept, reply

job = accept()
figures = {"outcome": "ok", "step_seconds": [1.0], "peak_gib": 0.25, "reserved_gib": None}
learning = json.loads(os.environ["LEARNING"]) if job["learns"] else None
reply(job, figures | {"core_wait": 0.0, "learning": learning})
