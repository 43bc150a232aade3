"""A package, so that `tests.benchmarks` and `tests.oracles` can be imported from anywhere here."""
