"""A child for test_child: it does what each request says."""

import os
import subprocess
import sys
import time

from bloomery.core.child import accept, reply, requests

job = accept()
if job.get("pids"):
    grandchild = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    reply(job, {"pids": [os.getpid(), grandchild.pid]})
for asked in requests(job):
    if asked["do"] == "double":
        reply(job, {"name": asked["name"]}, content=asked.get("content", b"") * 2)
    elif asked["do"] == "ignore":
        continue
    elif asked["do"] == "flood":
        for number in range(asked["count"]):
            reply(job, {"number": number}, content=bytes(1000))
    elif asked["do"] == "sleep":
        time.sleep(600)
    elif asked["do"] == "leave":
        reply(job, {"last": "words"})
        print("ValueError: no such driver\nwhat is said after it", flush=True)
        os._exit(7)
