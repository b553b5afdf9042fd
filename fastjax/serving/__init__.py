"""An HTTP server with OpenAI's routes over one engine.

One thread owns the engine (`worker`), and the event loop has all else: requests are checked (`fields`, `requests`),
and tokens become text and events (`answers`, `chat`, `completions`). The guard (`guard`) refuses what is not allowed
before a handler is called, and `server` listens, drains and ends.
"""
