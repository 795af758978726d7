"""Charts, one module each: from records to a Vega-Lite specification."""
