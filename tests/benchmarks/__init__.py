"""Benchmarks: each bench_*.py has `def run() -> BenchResult`; `make bench` runs them all."""
