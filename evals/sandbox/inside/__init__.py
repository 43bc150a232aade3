"""What runs inside the sandboxes: standard library only, Python 3.10 or newer, sent as source."""
