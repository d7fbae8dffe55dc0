"""The reward server under other trainers' protocols: one file a protocol, all of them translated to a ScoringRequest.

Each is off unless `HttpSettings.protocols` names it. Login, limits, versions and refusals are those of POST /score.
"""

from rmcore.serving.protocols import openrlhf, slime, vllm

PROTOCOLS = {"vllm": vllm.routes, "openrlhf": openrlhf.routes, "slime": slime.routes}
"""Each gives for a desk the routes that it adds to the server, as (method, path, endpoint)."""
