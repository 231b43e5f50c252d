"""Draws docs/structure.svg from the imports of the package: `python docs/draw_structure.py`.

A room is a folder of runtime/ (or a subfolder that stands for itself, such as a device), or one of the files
in runtime/ itself. An arrow from A to B says that A imports B. A room stands one floor above the highest room
that it imports, so all arrows point down; an arrow that cannot is drawn in red, and a test refuses it.
"""

import ast
from collections import Counter
from pathlib import Path
from xml.sax.saxutils import escape

ROOT = Path(__file__).resolve().parents[1]
PICTURE = ROOT / "docs" / "structure.svg"
OWN_ROOMS = (
    "models.config",
    "devices.ascend",
    "devices.cpu",
    "devices.cuda",
    "devices.null",
)  # subfolders that are rooms
WIDTH, MARGIN, BOX, FLOOR, GAP = 1180, 20, 44, 104, 14  # pixels
INK, PAPER, LINE, WRONG, MUTED = "#1f2933", "#f7f4ee", "#8a9bb0", "#c2402a", "#5f6c7b"

Arrows = Counter[tuple[str, str]]


def room_of(module: str) -> str:
    """The room of a module, e.g. `cache` for runtime.cache.prefix; `package` for runtime itself."""
    name = module.removeprefix("runtime").removeprefix(".")
    own = [room for room in OWN_ROOMS if name == room or name.startswith(room + ".")]
    return own[0].replace(".", "/") if own else name.split(".")[0] or "package"


def read() -> tuple[Counter[str], Arrows]:
    """Lines of each room, and the number of imports from room to room."""
    lines: Counter[str] = Counter()
    arrows: Arrows = Counter()
    for path in sorted((ROOT / "runtime").rglob("*.py")):
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        text = path.read_text(encoding="utf-8")
        room = room_of(module)
        lines[room] += text.count("\n")
        for target in _imports(ast.parse(text)):
            if room_of(target) not in (room, "package"):
                arrows[room, room_of(target)] += 1
    del lines["package"]
    return lines, Counter({(a, b): n for (a, b), n in arrows.items() if a in lines and b in lines})


def _imports(tree: ast.Module) -> list[str]:
    """Modules of this package that a file imports, also within functions; not those for type checkers."""
    found: list[str] = []
    pending: list[ast.AST] = [tree]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            continue
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if alias.name.startswith("runtime")]
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "runtime":
            found += [f"{node.module}.{alias.name}" for alias in node.names]
        pending += ast.iter_child_nodes(node)
    return found


def floors(rooms: list[str], arrows: Arrows) -> dict[str, int]:
    """The floor of each room, 0 for those that import nothing; rooms in a circle come in order of name."""
    below = {room: {b for (a, b) in arrows if a == room} for room in rooms}
    level: dict[str, int] = {}
    left = sorted(rooms)
    while left:
        ready = [room for room in left if not below[room] & set(left) - {room}]
        ready = ready or [min(left, key=lambda room: (len(below[room] & set(left)), room))]
        for room in ready:
            level[room] = max((level[b] + 1 for b in below[room] if b in level), default=0)
        left = [room for room in left if room not in ready]
    return level


def draw() -> str:
    """The picture as SVG text."""
    lines, arrows = read()
    level = floors(list(lines), arrows)
    top = max(level.values())
    boxes: dict[str, tuple[float, float, float]] = {}  # left, top, width
    for floor in range(top + 1):
        row = _ordered([room for room in lines if level[room] == floor], arrows, boxes)
        widths = [max(64.0, 9.0 * len(room) + 24, lines[room] ** 0.5 * 1.6) for room in row]
        space = (WIDTH - 2 * MARGIN - sum(widths)) / (len(row) + 1)
        x = MARGIN + space
        for room, width in zip(row, widths, strict=True):
            boxes[room] = (x, MARGIN + 46 + (top - floor) * FLOOR, width)
            x += width + space
    height = MARGIN * 2 + 46 + top * FLOOR + BOX
    body = [
        _arrow(f"{a} {b}", boxes[a], boxes[b], n, level[a] > level[b]) for (a, b), n in sorted(arrows.items())
    ]
    body += [_box(room, lines[room], *boxes[room]) for room in lines]
    caption = (
        f"{len(lines)} rooms, {sum(lines.values()):,} lines. An arrow points from a room to what it imports; "
        "its width is the number of imports."
    )
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
            'font-family="system-ui, sans-serif">',
            f'<rect width="{WIDTH}" height="{height}" fill="{PAPER}"/>',
            f'<text x="{MARGIN}" y="{MARGIN + 14}" font-size="15" fill="{MUTED}">{escape(caption)}</text>',
            *body,
            "</svg>\n",
        ]
    )


def _ordered(row: list[str], arrows: Arrows, boxes: dict[str, tuple[float, float, float]]) -> list[str]:
    """Rooms of one floor from left to right, each above the middle of what it imports."""

    def middle(room: str) -> float:
        below = [boxes[b][0] + boxes[b][2] / 2 for (a, b) in arrows if a == room and b in boxes]
        return sum(below) / len(below) if below else WIDTH / 2

    return sorted(row, key=lambda room: (middle(room), room))


def _box(room: str, lines: int, x: float, y: float, width: float) -> str:
    middle = x + width / 2
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{BOX}" rx="6" '
        f'fill="white" stroke="{INK}"/>'
        f'<text x="{middle:.1f}" y="{y + 20:.1f}" font-size="14" text-anchor="middle" fill="{INK}">'
        f"{escape(room)}</text>"
        f'<text x="{middle:.1f}" y="{y + 36:.1f}" font-size="11" text-anchor="middle" fill="{MUTED}">'
        f"{lines:,} lines</text>"
    )


def _arrow(
    name: str, start: tuple[float, float, float], end: tuple[float, float, float], count: int, is_down: bool
) -> str:
    x1, y1 = start[0] + start[2] / 2, start[1] + BOX
    x2, y2 = end[0] + end[2] / 2, end[1]
    bend = (y2 - y1) / 2
    return (
        f'<path data-arrow="{name}" d="M{x1:.1f},{y1:.1f} C{x1:.1f},{y1 + bend:.1f} '
        f'{x2:.1f},{y2 - bend:.1f} {x2:.1f},{y2:.1f}" '
        f'fill="none" stroke="{LINE if is_down else WRONG}" stroke-width="{0.6 + count**0.5 * 0.45:.2f}" '
        f'stroke-opacity="{0.55 if is_down else 0.9}"/>'
    )


if __name__ == "__main__":
    PICTURE.write_text(draw(), encoding="utf-8")
    print(f"wrote {PICTURE.relative_to(ROOT)}")
