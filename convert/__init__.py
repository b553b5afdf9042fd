"""Files and named arrays: Hugging Face, PEFT and bitsandbytes folders to NumPy and back, without JAX."""
