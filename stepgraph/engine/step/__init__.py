"""The step room captures whole training steps: `stepgraph.capture`, and Megatron's full iteration."""
