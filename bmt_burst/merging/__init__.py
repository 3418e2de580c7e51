"""Sums of partial results: outputs merged by lse, gradients added in fp32, attention sinks."""
