"""Kernels: what the plain walk does, in fewer steps. Each is optional, and held to the plain code by tests and at run time."""
