"""Recurrent mixers: layers that fold all tokens so far into a state.

Each has a form for decode rows, one token of many sequences, and one for all other rows, a chunk of tokens of
one sequence. Both are plain torch, and continue from the states of devices/state_rows.py.
"""
