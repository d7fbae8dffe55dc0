"""`rm-opt serve | publish`: a reward model behind vLLM, and new weights for one that serves."""

import asyncio
import os
from pathlib import Path
from typing import Annotated, Literal

import typer

from rmcore.cli.inputs import Checkpoint, MaxLen, RenderFn
from rmcore.config.model import WeightDtype

TOKEN_VARIABLE = "RM_OPT_TOKEN"  # noqa: S105 - the name of a variable


def serve(
    checkpoint: Checkpoint,
    host: Annotated[str, typer.Option(help="Address to listen on; beyond loopback RM_OPT_TOKEN must be set.")] = (
        "127.0.0.1"
    ),
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 takes a free one.")] = 8100,
    dtype: Annotated[
        WeightDtype, typer.Option(help="What vLLM computes in; bfloat16 takes half the memory.")
    ] = "float32",
    max_seq_len: MaxLen = None,
    render_fn: RenderFn = None,
    weights_dir: Annotated[
        Path | None,
        typer.Option(
            help="Folder through which weights are published, for this server alone; default: one that goes with it."
        ),
    ] = None,
    vllm: Annotated[
        str | None, typer.Option(help="Python of an environment with vLLM, or its vllm. Default: .venv-vllm.")
    ] = None,
    gpu_memory_share: Annotated[
        float, typer.Option(min=0.01, max=1.0, help="Share of a GPU's memory that vLLM may take.")
    ] = 0.5,
    start_timeout: Annotated[float, typer.Option(min=1, help="Seconds until vLLM must answer.")] = 600.0,
) -> None:
    """Serve a reward model with vLLM: POST /score, /health, /version, /metrics.

    Ctrl-C ends it. The token of clients is read from RM_OPT_TOKEN. Example: rm-opt serve --checkpoint checkpoints/best
    """
    from rmcore.serving.http_app import HttpSettings
    from rmcore.serving.server import ServeSettings
    from rmcore.serving.server import serve as run

    settings = ServeSettings(
        checkpoint=str(checkpoint),
        host=host,
        port=port,
        vllm=vllm,
        dtype=dtype,
        max_seq_len=max_seq_len,
        render_fn=render_fn,
        weights_folder=weights_dir,
        gpu_memory_share=gpu_memory_share,
        start_timeout_s=start_timeout,
        http=HttpSettings(token=os.environ.get(TOKEN_VARIABLE)),
    )
    print(f"starting vLLM with {checkpoint}; the first time takes a minute", flush=True)
    asyncio.run(run(settings, _announce))
    print("stopped")


def _announce(address: str) -> None:
    example = '{"inputs": [{"prompt": "2 + 2?", "response": "4"}]}'
    header = f' -H "Authorization: Bearer ${TOKEN_VARIABLE}"' if TOKEN_VARIABLE in os.environ else ""
    print(f"serving     {address}", flush=True)
    print(f"try         curl {address}/score{header} -H 'Content-Type: application/json' -d '{example}'", flush=True)


def publish(
    checkpoint: Checkpoint,
    server: Annotated[str, typer.Option(help="Address of the server, as `rm-opt serve` printed it.")],
    mode: Annotated[
        Literal["full", "head_only", "lora"], typer.Option(help="Which tensors travel to the server.")
    ] = "full",
    weights_dir: Annotated[
        Path | None, typer.Option(help="The server's weights folder, where it has another name on this machine.")
    ] = None,
    render_fn: RenderFn = None,
) -> None:
    """Have a running reward server serve another checkpoint, without stopping it.

    The checkpoint is one of the same shape.

    Example: rm-opt publish --checkpoint checkpoints/step_200 --server http://127.0.0.1:8100
    """
    from rmcore.models.reward_model import BradleyTerryRM
    from rmcore.serving.weight_sync import create_rm_publisher

    rm = BradleyTerryRM.from_pretrained(checkpoint, device="cpu", render_fn=render_fn)
    publisher = create_rm_publisher(server, token=os.environ.get(TOKEN_VARIABLE), mode=mode, weights_folder=weights_dir)
    version = publisher.publish(rm)
    print(f"version {version.weight_version} serves, {version.checkpoint_digest[:12]}")
