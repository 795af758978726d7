"""Finds a model's files, loads it, and checks that the engine drives it exactly."""
