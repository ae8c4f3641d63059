"""Tables, figures and pages of results, which are read and never computed here."""

from pathlib import Path

TEMPLATES = Path(__file__).parent / "templates"
