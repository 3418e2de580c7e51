"""Text, tokens on disk, and the rows that a rank trains on."""
