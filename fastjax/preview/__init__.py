"""A preview of the training data as the model sees them. Nothing here imports JAX."""
