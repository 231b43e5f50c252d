"""Figures against their limits as a bar chart in SVG, for the README."""

from pathlib import Path

WIDTH, LABEL, BAR, GAP = 760, 300, 18, 8


def draw(title: str, bars: list[tuple[str, float, float | None]], path: Path) -> Path:
    """Writes the chart and returns its path. `bars`: name, share of the limit, and the wanted share, if
    any."""
    height, scale = 40 + len(bars) * (BAR + GAP), WIDTH - LABEL - 60
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/><text x="8" y="20" '
        f'font-size="14">{_safe(title)}</text>',
    ]
    for at, (name, part, wanted) in enumerate(bars):
        y, length = 32 + at * (BAR + GAP), max(0.0, min(part, 1.0)) * scale
        colour = "#3a7d44" if wanted is None or part >= wanted else "#c8553d"
        lines.append(
            f'<text x="{LABEL - 8}" y="{y + 13}" text-anchor="end">{_safe(name)}</text>'
            f'<rect x="{LABEL}" y="{y}" width="{scale}" height="{BAR}" fill="#eee"/>'
            f'<rect x="{LABEL}" y="{y}" width="{length:.1f}" height="{BAR}" fill="{colour}"/>'
            f'<text x="{LABEL + scale + 6}" y="{y + 13}">{part:.0%}</text>'
        )
        if wanted is not None:
            x = LABEL + wanted * scale
            lines.append(
                f'<line x1="{x:.1f}" y1="{y - 2}" x2="{x:.1f}" y2="{y + BAR + 2}" stroke="black" '
                'stroke-width="2"/>'
            )
    path.write_text("\n".join([*lines, "</svg>", ""]))
    return path


def _safe(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
