"""The decode loop: unmodified Hugging Face models over preallocated cache slots."""
