"""Parts of a sequence that a model computes in turn: chunks of training, of a prompt, new tokens."""
