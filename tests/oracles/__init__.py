"""Other authors' code that the tests compare against; see fetch.py."""
