"""Evaluations of a trained model: retrieval from long texts, and perplexity by position."""
