"""`runtime route`: a reverse proxy that spreads requests over servers (docs/routing.md)."""
