"""Replays store gradients where `.grad` expects them, and add to them as eager does."""
