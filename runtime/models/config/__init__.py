"""What a checkpoint says of its model, read without torch: sizes, layers, weight formats, tasks."""
