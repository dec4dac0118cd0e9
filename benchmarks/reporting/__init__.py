"""Figures and a page from committed results; nothing here measures, and nothing is shown that no file holds."""
