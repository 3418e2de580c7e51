"""A trained model: how it is opened, how its texts begin and end, and its tokenizer in transformers."""
