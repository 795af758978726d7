"""Rules of the policy interface that can be checked without a model."""
