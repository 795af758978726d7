"""The rules of the policy interface that need no model."""
