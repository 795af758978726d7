"""Streams of tokens with fingerprints, and the data sets they are made from."""
