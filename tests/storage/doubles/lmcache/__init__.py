"""A double."""
