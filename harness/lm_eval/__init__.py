"""lm-eval under a policy: its requests through our decode loop, and our suites over its tasks."""
