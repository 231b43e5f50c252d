"""What a step's plan says of memory beside the page table (messages.StepPlan): copies between tiers, window pages, states."""

import numpy as np
from msgspec import Struct


class Moves(Struct, frozen=True, array_like=True):
    """Pages that change tiers in a step, before its forward: all saves (device to host), then all loads (host to device).

    A page that a step computes can be saved by a later step only. When a step's result is there, its saves are in host memory.
    """

    save_pages: np.ndarray  # int32 [S]: device pages
    save_hosts: np.ndarray  # int32 [S]: the host pages they are copied to
    load_hosts: np.ndarray  # int32 [L]
    load_pages: np.ndarray  # int32 [L]


class WindowPages(Struct, frozen=True, array_like=True):
    """Page updates of the sliding-window layers, where they have a pool of their own: their page ids have nothing to do with those of
    the full layers. Rows that no token of this or a later step can see may hold anything."""

    slots: np.ndarray  # int32 [P]: window_table[slots, rows] = ids
    rows: np.ndarray  # int32 [P]
    ids: np.ndarray  # int32 [P]


class StateMoves(Struct, frozen=True, array_like=True):
    """What becomes of the states of recurrent layers, of which a rank keeps `num_state_slots` (RankReady); no plan uses number 0.

    A newcomer owns a state until its slot is taken by another sequence. Each row starts from the state that its sequence owns and leaves
    there the one after its last token. Before the forward come the loads, which read what the steps before have left: a state may be
    read by one load and written by a later one. A load from 0 makes the empty state, that of no tokens. After the forward come the
    keeps, which read what this step has left. Neither loads nor keeps write to one state twice.
    """

    slots: np.ndarray  # int32 [A]: state_slot[slots] = owned
    owned: np.ndarray  # int32 [A]
    load_from: np.ndarray  # int32 [L]
    load_to: np.ndarray  # int32 [L]
    keep_from: np.ndarray  # int32 [K]
    keep_to: np.ndarray  # int32 [K]
