"""Streams of tokens, each with a fingerprint."""
