"""Model-level regression on real weights, with no Blackwell GPU: see README.md in this folder."""
