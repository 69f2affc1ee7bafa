"""The rooms of the backends; they never import each other, and dispatch imports them by name at call time."""
