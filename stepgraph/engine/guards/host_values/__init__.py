"""Host values that a step reads: found, compared, and named when they change."""
