"""Results as JSON, as a table for a terminal, and as a figure."""
