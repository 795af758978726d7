"""Prepare, measure and estimate the cells of a suite, show progress, and check policies."""
