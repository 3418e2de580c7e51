"""What other packages for sequence parallelism export, computed here: a script for one of them
changes its imports.

ring_flash_attn    of ring-flash-attention 0.1.8
yunchang           of yunchang 0.6.4, also known as USP

The attention is `burst_attn_func`'s. These modules say in its terms which tokens a rank has and
what they see. docs/migrate.md tells what changes for a script.
"""
