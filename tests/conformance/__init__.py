"""Conformance suites: each runs one contract over everything that is registered for it.

python -m pytest tests/conformance -k NAME    what a new kernel, strategy, layout, mask or transport
must pass
"""
