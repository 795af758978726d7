"""Kernels: faster versions of the plain walk. Each is optional, and compared with the plain code in tests and at run time."""
