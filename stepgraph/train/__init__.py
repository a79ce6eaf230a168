"""The training loop: `stepgraph.train.pretrain(cfg)` and `stepgraph.train.finetune(cfg)`."""

from stepgraph.torch_import import importing_torch

with importing_torch():
    from stepgraph.train.run import TrainingStopped, finetune, pretrain
    from stepgraph.train.run_report import RunReport

__all__ = ["RunReport", "TrainingStopped", "finetune", "pretrain"]
