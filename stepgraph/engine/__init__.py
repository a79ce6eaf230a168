"""The engine captures, replays and proves. It knows neither the tools nor the lab.

Rooms, in the order in which they may import:

- `backends`: the device protocol, CUDA and the tape; random states; the guards' row in C++.
- `memory`: static buffers, tensors lent to callers, the pool that shares them.
- `oplog`: the operations of a call, and the first difference between two logs.
- `grads`: gradients of parameters: where they are stored, summed and handed out.
- `guards`: what may change between calls: signature, model, optimizer, hooks, host values.
- `optim`: where each optimizer runs, and with which numbers.
- `order`: schedules of pipelines, lifetimes, and a cursor that checks replays.
- `observe`: what an eager call touches and changes.
- `call`: the session, options, reports, and the proof that a recording equals an eager call.
- `record`: recordings: a chain of segments for a step, a pair of forward and backward for a part.
- `parts`: graphs for modules, callables and pipeline stages.
- `step`: graphs for whole steps, and the fallback to graphs for modules.

A captured call goes through six of them. `step` looks the call's signature up (`guards`). An unknown one runs eagerly
while it is observed (`observe`) and logged (`oplog`). Then it is recorded (`record`, with memory from `memory` and a
graph from `backends`), and the recording's log is compared with the eager call's (`call`). A known one is replayed if
no guard finds a change.
"""
