"""Models: finding their files, loading them, and checking that the engine drives them exactly."""
