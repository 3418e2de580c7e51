"""The whole sequence as data: masks, layouts and tiles, without tensors, ranks and devices."""
