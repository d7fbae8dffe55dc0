"""`rm-opt serve | publish`: a reward model behind vLLM, and new weights for one that serves."""

import asyncio
import os
import shlex
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import quote

import typer

from rmcore.cli.inputs import Checkpoint, MaxLen, RenderFn
from rmcore.config.model import WeightDtype


def serve(
    checkpoint: Checkpoint,
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 is all of this machine's.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 takes a free one.")] = 8100,
    name: Annotated[
        list[str] | None,
        typer.Option(
            help="Another host name that clients use, of a proxy for example; requests to others are refused."
        ),
    ] = None,
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
    protocols: Annotated[
        str, typer.Option(help="Other trainers' protocols that are answered, too: any of openrlhf,slime.")
    ] = "",
    gpu_memory_share: Annotated[
        float, typer.Option(min=0.01, max=1.0, help="Share of a GPU's memory that vLLM may take.")
    ] = 0.5,
    start_timeout: Annotated[float, typer.Option(min=1, help="Seconds until vLLM must answer.")] = 600.0,
) -> None:
    """Serve a reward model with vLLM: POST /score, /health, /version, /metrics.

    Clients need the token of RM_OPT_TOKEN, or the one that is made and printed at the start. Ctrl-C ends the server.

    Example: rm-opt serve --checkpoint checkpoints/best
    """
    from rmcore.serving.http_app import HttpSettings
    from rmcore.serving.server import ServeSettings
    from rmcore.serving.server import serve as run
    from rmcore.serving.token_file import TOKEN_VARIABLE, kept_token, require_token_folder, token_file

    named = os.environ.get(TOKEN_VARIABLE)
    spoken = tuple(one.strip() for one in protocols.split(",") if one.strip())
    http = HttpSettings(names=tuple(name or ()), protocols=spoken)
    if named is None:
        require_token_folder()
    else:
        http = replace(http, token=named)
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
        http=http,
    )
    print(f"starting vLLM with {checkpoint}; the first time takes a minute", flush=True)

    def announce(address: str) -> None:
        header = f"${TOKEN_VARIABLE}"
        if named is None:
            place = token_file(address)
            print(f"token       {http.token}", flush=True)
            print(f"            kept until the end in {place}, where `rm-opt publish` and RewardClient find it")
            header = f"$(cat {shlex.quote(str(place))})"
        _announce(address, header)
        if http.protocols:
            login = f"${TOKEN_VARIABLE}" if named is not None else quote(http.token, safe="")
            print(
                f"protocols   {', '.join(http.protocols)}, at {address.replace('://', f'://rm:{login}@')}/…", flush=True
            )

    keep = partial(kept_token, token=http.token) if named is None else nullcontext
    asyncio.run(run(settings, announce, keep=keep))
    print("stopped")


def _announce(address: str, token: str) -> None:
    example = '{"inputs": [{"prompt": "2 + 2?", "response": "4"}]}'
    headers = f"-H \"Authorization: Bearer {token}\" -H 'Content-Type: application/json'"
    print(f"serving     {address}", flush=True)
    print(f"try         curl {address}/score {headers} -d '{example}'", flush=True)


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
    publisher = create_rm_publisher(server, mode=mode, weights_folder=weights_dir)
    version = publisher.publish(rm)
    print(f"version {version.weight_version} serves, {version.checkpoint_digest[:12]}")
