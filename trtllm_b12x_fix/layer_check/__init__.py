"""One layer: what each way of passing scales costs, measured against exact scales and the truth."""
