"""Broken on purpose: every check of this repository must catch its own defect here."""
