"""/v1/uploads: files that come in parts."""
