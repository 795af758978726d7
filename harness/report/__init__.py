"""Pages and verdicts computed from records. Imports records, never torch."""
