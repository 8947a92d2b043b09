"""A worker that does what it is told: answer, sleep, or end."""

from __future__ import annotations

import json
import os
import sys
import time


def main() -> None:
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        if request["do"] == "sleep":
            time.sleep(60)
        if request["do"] == "end":
            os._exit(3)
        print(json.dumps({"value": request["do"], "pid": os.getpid()}), flush=True)
