"""lm-eval under a policy: our decode loop runs lm-eval's requests, and our suites run lm-eval's tasks."""
