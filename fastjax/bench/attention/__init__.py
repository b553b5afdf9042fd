"""How fast and how exact attention is on this device, by every implementation that can be had, and its block sizes."""
