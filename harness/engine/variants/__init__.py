"""Llamas whose attention differs in one thing, each a model type and a file."""
