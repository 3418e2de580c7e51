"""A call of attention: check the arguments, compare them with the other ranks', make the plan.

options   the options of a call, as one dataclass
inputs    the tensors of a call, checked once
masking   masks, layouts and scores, for all rows of the batch or for each
terms     a call as one rank understands it, and the comparison with the other ranks
call      the steps of a call, from its arguments to out and lse
refusal   errors of one rank's arguments, which all ranks raise
autograd  the forward and the backward, as autograd sees them
"""
