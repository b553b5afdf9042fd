"""What the model will see of the data, shown before anything is trained. Nothing here imports JAX."""
