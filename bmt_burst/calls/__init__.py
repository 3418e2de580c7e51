"""A call of attention: check the arguments, compare them with the other ranks', make the plan."""
