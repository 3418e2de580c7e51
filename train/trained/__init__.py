"""A trained model: how it is opened, how its texts begin and end, its tokenizer in transformers."""
