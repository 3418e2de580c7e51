"""Functions of other packages, computed by `burst_attn_func`. See docs/migrate.md."""
