"""Files, locks, signals and command lines: what the other folders of train/ may import."""
