"""Jobs for a server of jobs that need no torch: each shows one way to end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any


def prepare() -> None:
    """Nothing is imported beforehand."""
    if os.environ.get("STEPGRAPH_TEST_PREPARE") == "fail":
        raise RuntimeError("cannot prepare")


def run(request: dict[str, Any]) -> dict[str, Any]:
    """End as the request says; return the facts about this process."""
    print("what a library prints")
    facts = {"pid": os.getpid(), "parent": os.getppid(), "session": os.getsid(0), "stdin": sys.stdin.read()}
    match request["do"]:
        case "write":
            return facts
        case "raise":
            raise ValueError("the job is wrong")
        case "exit":
            raise SystemExit(5)
        case "die":
            os.kill(os.getpid(), signal.SIGKILL)
        case "kill the server":
            Path(request["told"]).write_text(json.dumps(facts))
            os.kill(os.getppid(), signal.SIGKILL)
            time.sleep(1000)
        case "hang":
            hanging = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
            Path(request["told"]).write_text(json.dumps(facts | {"child": hanging.pid}))
            time.sleep(1000)
    os._exit(0)
