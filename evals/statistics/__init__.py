"""Paired statistics of two arms that answered the same documents."""
