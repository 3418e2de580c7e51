"""A call of attention: check the arguments, compare them with the other ranks', make the plan.

inputs    the tensors of a call, checked once
softmax   softmax attention as a kind, and the steps of its calls
refusal   errors of one rank's arguments, which all ranks raise
autograd  the forward and the backward, as autograd sees them
"""
