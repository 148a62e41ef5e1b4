"""A plain PyTorch training loop that publishes every optimizer step, and a process that follows it.

    python examples/pytorch_loop.py [--store URL] [--steps 8]

A training loop needs only two lines: the `Publisher` and its `attach`. The follower shares nothing with the trainer but
the store. It gets the model in bf16, and at the end both sides compute the digest of all their weights.
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from torch import nn

import deltawire

ROW = "{:>8} {:>6} {:>10} {:>9} {:>10} {:>14}"


def make_model(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Embedding(256, 128), nn.Flatten(), nn.Linear(16 * 128, 512), nn.GELU(), nn.Linear(512, 256))


def train(model: nn.Module, num_steps: int, publisher: deltawire.Publisher) -> None:
    """Learn to predict the next number of a sequence that counts up."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-6)
    publisher.attach(optimizer, every=1)
    for _ in range(num_steps):
        rows = (torch.randint(256, (32, 1)) + torch.arange(17)) % 256
        nn.functional.cross_entropy(model(rows[:, :16]), rows[:, 16]).backward()
        optimizer.step()  # also publishes a version
        optimizer.zero_grad()


def follow(url: str, last: int) -> None:
    """The other side: keep a bf16 model up to date, and print the digest of its final weights."""
    model = make_model(seed=1).to(torch.bfloat16)  # not the trainer's weights
    with deltawire.Replica(url, model) as replica:
        replica.wait(last, timeout=60)
    print(deltawire.digest(dict(model.named_parameters())))


def show(publisher: deltawire.Publisher) -> None:
    """Print what is in the store, version by version."""
    print(ROW.format("version", "step", "changed", "density", "bytes", "of all weights"))
    for version in publisher.run.versions():
        manifest = publisher.run.manifest(version)
        hop = manifest.hop
        density, ratio = hop.num_changed / manifest.num_elements, hop.num_bytes / (2 * manifest.num_elements)
        print(ROW.format(version, manifest.step, f"{hop.num_changed:,}", f"{density:.2%}", f"{hop.num_bytes:,}",
                         f"1/{1 / ratio:.0f}"))  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", help="where the run lives; a temporary folder unless given")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--follow", type=int, metavar="VERSION", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.follow is not None:
        follow(arguments.store, arguments.follow)
        return
    with tempfile.TemporaryDirectory() as folder:
        url = arguments.store or str(Path(folder) / "run")
        model = make_model(seed=0)
        with deltawire.Publisher(url, model, queue_size=arguments.steps) as publisher:
            first = publisher.publish(step=0).version  # all weights, once
            command = [sys.executable, __file__, "--store", url, "--follow", str(first + arguments.steps)]
            follower = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
            train(model, arguments.steps, publisher)
            publisher.flush()
            show(publisher)
        theirs = follower.communicate()[0].strip()
    ours = str(deltawire.digest({name: value.to(torch.bfloat16) for name, value in model.named_parameters()}))
    print(f"\ntrainer   {ours}\nfollower  {theirs}")
    sys.exit("the digests differ" if ours != theirs else 0)


if __name__ == "__main__":
    main()
