"""A small relu2 MoE language model with exact answers, and what the bake costs it."""
