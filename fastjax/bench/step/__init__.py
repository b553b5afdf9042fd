"""The whole train step of a model of a known shape with random weights: speed, memory, profile."""
