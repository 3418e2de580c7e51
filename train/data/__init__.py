"""From text to tokens on disk, and from these to the rows that a rank trains on."""
