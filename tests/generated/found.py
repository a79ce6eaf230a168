"""Programs that random search found to be silently wrong once, as small as they were made."""

from __future__ import annotations

FOUND: dict[str, tuple[str, object]] = {}
