"""Understand a script, a failure or a machine: check, explain, doctor, frozen."""
