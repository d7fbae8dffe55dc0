"""A trained reward model behind vLLM: server, client, and weights that are replaced while it serves.

Nothing here imports vLLM, which lives in an environment of its own and is spoken to over a Unix socket.
"""

from rmcore.core.capabilities import Capability

CAPABILITY = Capability(
    {
        "serve": "Serve a reward model with vLLM: POST /score, /health, /version, /metrics.",
        "publish": "Have a running reward server serve another checkpoint, without stopping it.",
    },
    panel="Services",
)
