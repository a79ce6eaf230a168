"""The megatron room captures the layers of a Megatron training ahead of time."""
