"""Trainers and accelerate loops in which groups of ranks share each sequence."""
