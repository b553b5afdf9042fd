"""The decoder and its configuration."""
