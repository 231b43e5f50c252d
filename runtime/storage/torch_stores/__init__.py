"""Backends whose libraries import torch. They run in a process of their own (storage/process.py)."""
