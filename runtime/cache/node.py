"""A node of the prefix tree: one full page of tokens, wherever its keys and values lie."""


class Node:
    """`page` is its page on the device, `host` its page in host memory; 0: none. A node in the tree has at
    least one, a root neither.

    `depth` is the number of pages from the root to here, this one included. Nodes with a device page are
    closed towards the root, and so are locked ones, which all have one: what is in host memory only hangs
    below. Its window page and its state come and go as they like.
    """

    __slots__ = (
        "parent",
        "key",
        "depth",
        "children",
        "page",
        "host",
        "num_resident",
        "num_hosted",
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
    )

    def __init__(self, parent: "Node | None", key: bytes, depth: int) -> None:
        self.parent = parent
        self.key = key  # the token ids of the page, as int32 bytes; of a root: the namespace
        self.depth = depth
        self.children: dict[bytes, Node] = {}
        self.page = 0
        self.host = 0
        self.num_resident = 0  # children with a device page
        self.num_hosted = 0  # children with a host page
        self.locks = 0  # sequences that run through it
        self.pins = 0  # who reads or writes its host page: it is not given to anybody else meanwhile
        self.hits = 0  # sequences that found it here
        self.last_used = 0
        self.window = 0  # its page in the pool of sliding-window layers; 0: none (see window.py)
        self.is_end = False  # of window pages from which a sequence went on, or could
        self.window_locks = 0  # sequences whose window holds it
        self.state = 0  # the slot of recurrent layers' state after its last token; 0: none (see states.py)
        self.queued = 0  # bits of the eviction queues that have an entry of it
        self.is_due = False  # waits to be saved
        # the step that writes the host page, while that is in flight; 0: the host page is as it should be
        self.save_step = 0
        # names tokens and namespace in tiers that outlive the process; made when it is asked for
        self.digest = b""

    def child(self, key: bytes) -> "Node":
        """The child of `key`; one that is made for it takes a page at once."""
        child = self.children.get(key)
        if child is None:
            child = self.children[key] = Node(self, key, self.depth + 1)
        return child

    @property
    def num_locked(self) -> int:
        """How many of the pages from the root to here sequences run through."""
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
        """Whether the tree still has it; roots are not asked."""
        return self.parent is not None and self.parent.children.get(self.key) is self
