"""Generation by a model of a known shape with random weights: decoding, prefill, mixed requests, log-probabilities."""
