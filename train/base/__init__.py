"""Files, locks, signals and command lines. All other folders of train/ may import these modules."""
