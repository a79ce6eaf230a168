"""Capturing and replaying: sessions, chains of segments, whole steps."""
