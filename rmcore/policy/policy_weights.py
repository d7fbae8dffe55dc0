"""The weights of a policy, in this process."""

from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from rmcore.core.errors import ModelError
from rmcore.models.loading import guard, quiet_libraries
from rmcore.policy.policy import Policy


def load_weights(policy: Policy, dtype: torch.dtype) -> Any:
    """The causal model of a policy, on the CPU, which samples the policy's whole distribution until it ends.

    Raises:
        ModelError: it cannot be read, or lacks weights.
    """
    quiet_libraries()
    model, info = guard(
        policy.name,
        lambda: AutoModelForCausalLM.from_pretrained(
            policy.weights(),
            dtype=dtype,
            use_safetensors=True,
            trust_remote_code=policy.trust_remote_code,
            output_loading_info=True,
        ),
    )
    if info["missing_keys"]:
        raise ModelError(
            f"the policy {policy.name} lacks weights ({', '.join(sorted(info['missing_keys'])[:3])}...), which would "
            "be random. Name the folder of a whole causal model."
        )
    # Whatever the folder recommends (top-k, penalties, suppressed tokens) is another distribution than the policy's.
    model.generation_config = GenerationConfig(eos_token_id=list(policy.stop_ids) or None)
    return model
