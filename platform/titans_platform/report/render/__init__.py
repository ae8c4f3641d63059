"""A report as HTML, Markdown, CSV, LaTeX and lines for a terminal."""
