"""What all stored objects share: their folder, disk, quota, uploads and tasks. See docs/stored.md."""
