"""Tests of the A/B evaluation: sandbox, grading, statistics."""
