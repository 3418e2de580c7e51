"""The processes of a run: how ranks start, join, replace themselves, and end."""
