"""lm-eval under a policy: its requests run through our decode loop, and our suites run its tasks."""
