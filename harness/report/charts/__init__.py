"""What the charts show: one module a chart, from records to a specification."""
