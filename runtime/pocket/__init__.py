"""pocket, the small demonstration model that ships with the package."""

from pathlib import Path

PATH = Path(__file__).resolve().parent
