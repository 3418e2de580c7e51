"""The settings of a run, their checks, and the model that they name."""
