"""The operations of a call: noted while it runs, and compared with those of another call."""

from stepgraph.oplog.compare import Difference, first_difference
from stepgraph.oplog.log import Log, OpLog, Vocabulary

__all__ = ["Difference", "Log", "OpLog", "Vocabulary", "first_difference"]
