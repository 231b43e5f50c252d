"""Drafts that the ranks make with a draft model, at the beginning of the step that verifies them."""
