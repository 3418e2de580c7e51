"""Plans of a run, made before it starts and without a GPU: memory, seconds, price.

ledger     counts the bytes of tensors without values (on the meta device) while real code runs
attention  the memory of one attention, found by running its plan on such tensors
sharding   the memory of weights, gradients and the optimizer on an engine
memory     the memory of a training step, by part
seconds    the time of a training step, by part
hardware   the GPUs that are known, as data
search     the longest sequence, and the options to recommend
report     all of that as text
"""
