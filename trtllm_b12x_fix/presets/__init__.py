"""Layers made on the fly at published shapes: stand-ins for checkpoints that nobody here has."""
