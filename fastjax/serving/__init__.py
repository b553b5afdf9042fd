"""A server of models over HTTP, and its page."""
