"""Prepares, measures and estimates the cells of a suite and shows progress; checks policies."""
