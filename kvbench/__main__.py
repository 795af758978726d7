"""`python -m kvbench` is `bench`."""

from kvbench.harness.cli import main

main()
