"""Tasks, one file each: (model, policy, data) -> metrics."""
