"""Models: find a model's files, load the model, and check that the engine drives it exactly."""
