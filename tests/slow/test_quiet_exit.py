"""A program may end in any way with graphs alive: no message, its own exit code."""

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.forked import NONE

ROOT = Path(__file__).parents[2]
TRAINING = """
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.AdamW(model.parameters())
def train(x):
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    return loss
session = stepgraph.Session()
step = stepgraph.capture(train, session=session, warmup=1)
for _ in range(4):
    step(torch.ones(2, 4))
assert step.report().replays == 2
"""
EXITS = {
    "step alive": "",
    "closed": "step.close(); session.close()",
    "session dropped first": "del session",
    "in a cycle": "loop = [step]; loop.append(loop); del step, session",
    "by an exception": "raise KeyError('mine')",
}
DRIVER = """
import json, os, sys
import torch, torch._dynamo, stepgraph
torch.set_num_threads(1)
training, exits = json.loads(sys.argv[1])
found = {}
for name, last in exits.items():
    read, write = os.pipe()
    child = os.fork()
    if child == 0:  # one interpreter a case: it trains and then ends as any other does
        os.dup2(write, 1)
        os.dup2(write, 2)
        os.close(read)
        os.close(write)
        exec(training, globals())
        exec(last, globals())
        sys.exit(0)
    os.close(write)
    with os.fdopen(read) as said:
        text = said.read()
    found[name] = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), text]
print(json.dumps(found))
"""


def test_exit_with_graphs_alive_is_quiet() -> None:
    arguments = [sys.executable, "-c", DRIVER, json.dumps([TRAINING, EXITS])]
    done = subprocess.run(arguments, cwd=ROOT, capture_output=True, text=True, check=True, env=os.environ | NONE)
    assert done.stderr == ""
    found = json.loads(done.stdout)
    code, text = found.pop("by an exception")
    assert found == {name: [0, ""] for name in EXITS if name != "by an exception"}
    assert code == 1
    assert text.splitlines()[-1] == "KeyError: 'mine'"
    assert text.count("Traceback") == 1
