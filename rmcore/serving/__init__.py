"""A trained reward model behind vLLM: server, client, and weights that are replaced while it serves.

Nothing here imports vLLM, which lives in an environment of its own and is spoken to over a Unix socket.
"""
