"""End-to-end A/B evaluation: scripts of this repository, not part of the installed package."""
