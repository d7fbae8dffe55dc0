"""Digests of JSON records: keys of inputs, and records that hold the digest of all the rest of themselves."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any, TypeGuard

SEAL = "manifest_sha256"
"""Field of a manifest that holds the digest of all the rest of it."""


def canonical_json(value: Any) -> str:
    """JSON with sorted keys and no spaces: equal values give equal text. Raises ValueError on NaN."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def make_key(inputs: Mapping[str, Any]) -> str:
    """Digest a stage's inputs: 64 hex digits."""
    return hashlib.sha256(canonical_json(inputs).encode()).hexdigest()


def with_self_digest(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """A manifest with its own digest in it, by which a change of any of it is seen."""
    content = {name: value for name, value in manifest.items() if name != SEAL}
    return {**content, SEAL: make_key(content)}


def is_whole(manifest: Any) -> TypeGuard[dict[str, Any]]:
    """Whether a manifest is what was written."""
    return isinstance(manifest, dict) and manifest == with_self_digest(manifest)
