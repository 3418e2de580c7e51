"""A call of attention: its arguments are checked, told to the other ranks, and become a problem
with a plan.
"""
