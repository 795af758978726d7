"""Records in, pages and verdicts out. Imports records, never torch."""
