"""The ranks of a call: groups, the rings between them, how they agree, and simulated ranks."""
