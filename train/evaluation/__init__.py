"""Evaluations of a trained model: retrieval from long texts, and perplexity by position.

haystack.py     the text in which something is hidden
retrieval.py    needles and chains of variables, their rows and their scores
positions.py    perplexity by position
tasks.py        the tasks by name, their options, and what they evaluate
report.py       JSON and pictures
"""
