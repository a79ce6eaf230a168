"""The pipeline room graphs the stages of `torch.distributed.pipelining`."""
