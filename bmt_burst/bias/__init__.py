"""A learned bias: rows of a table that attention adds to the scores of pairs.

scores     `Scores`, the row of each pair, as data
areas      the parts of the visible pairs in which all pairs have one row
call_bias  the bias of one kernel call
kernels    kernels that add it, one a file
scoring    the computation of a rank's pairs and of the table's gradient
extension  the seam to a call of attention
"""
