"""The operations of a call: noted while it runs, and compared with those of another call."""

from stepgraph.engine.oplog.compare import Difference, differences, first_difference
from stepgraph.engine.oplog.log import (
    Effects,
    Log,
    OpLog,
    Roles,
    StandingMode,
    Vocabulary,
    current_log,
    is_logged,
    left_out,
)
from stepgraph.engine.oplog.unseen import noting_unseen

__all__ = [
    "Difference",
    "Effects",
    "Log",
    "OpLog",
    "Roles",
    "StandingMode",
    "Vocabulary",
    "current_log",
    "differences",
    "first_difference",
    "is_logged",
    "left_out",
    "noting_unseen",
]
