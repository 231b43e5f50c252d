"""A node of the prefix tree: one full page of tokens, whose keys and values are on the device, in host
memory, or both.
"""


class Node:
    """`page` is its page on the device, `host` its page in host memory; 0: none. A node in the tree has at
    least one of them, a root has neither.

    `depth` is the number of pages from the root to here, this one included. If a node has a device page, so
    have all nodes above it, and likewise for locks; locked nodes have device pages. So nodes that are in host
    memory only hang below the others. Window pages and states come and go independently.
    """

    __slots__ = (
        "parent",
        "key",
        "depth",
        "children",
        "page",
        "host",
        "num_device_children",
        "num_host_children",
        "locks",
        "pins",
        "hits",
        "last_used",
        "queued",
        "is_due",
        "save_step",
        "digest",
        "window",
        "window_locks",
        "is_end",
        "state",
        "host_state",
    )

    def __init__(self, parent: "Node | None", key: bytes, depth: int) -> None:
        self.parent = parent
        self.key = key  # the token ids of the page, as int32 bytes; of a root: the namespace
        self.depth = depth
        self.children: dict[bytes, Node] = {}
        self.page = 0
        self.host = 0
        self.num_device_children = 0  # children with a device page
        self.num_host_children = 0  # children with a host page
        self.locks = 0  # running sequences whose pages include it
        self.pins = 0  # readers and writers of its host page, which is not reused meanwhile
        self.hits = 0  # sequences that found it here
        self.last_used = 0
        self.window = 0  # its page in the pool of sliding-window layers; 0: none (see window.py)
        self.is_end = False  # its window page or state is one from which a sequence continued, or could
        self.window_locks = 0  # sequences whose window holds it
        self.state = 0  # the slot of recurrent layers' state after its last token; 0: none (see states.py)
        self.host_state = 0  # the place of its copy in host memory; 0: none (see host_states.py)
        self.queued = 0  # bits of the eviction queues that it is in
        self.is_due = False  # waits to be saved
        # the step that writes the host page, while it is in flight; 0: the host page is complete
        self.save_step = 0
        # content key of tokens and namespace in storage tiers; computed when it is first needed
        self.digest = b""

    def child(self, key: bytes) -> "Node":
        """The child of `key`. A new one must get a page at once."""
        child = self.children.get(key)
        if child is None:
            child = self.children[key] = Node(self, key, self.depth + 1)
        return child

    @property
    def num_locked(self) -> int:
        """Locked nodes from the root to here, the root not counted."""
        node = self
        while node.parent is not None and not node.locks:
            node = node.parent
        return node.depth

    def path(self) -> list[int]:
        """Device pages from the root to here."""
        pages = []
        node = self
        while node.parent is not None:
            pages.append(node.page)
            node = node.parent
        pages.reverse()
        return pages

    @property
    def is_attached(self) -> bool:
        """Whether the tree still has it; not defined for roots."""
        return self.parent is not None and self.parent.children.get(self.key) is self
