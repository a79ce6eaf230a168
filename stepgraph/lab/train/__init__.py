"""The training loop: `stepgraph.lab.train.pretrain(cfg)` and `stepgraph.lab.train.finetune(cfg)`."""

from stepgraph.core.torch_import import importing_torch

with importing_torch():
    from stepgraph.lab.train.run import TrainingStopped, finetune, pretrain
    from stepgraph.lab.train.run_report import RunReport

__all__ = ["RunReport", "TrainingStopped", "finetune", "pretrain"]
