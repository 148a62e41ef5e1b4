#!/bin/sh
# How long a newcomer's commands take: a bare clone in a new folder, `make demo`, `make test`, then `make test-all`, each with
# its parts. Run it where nothing else runs: tools/time-clone.sh > benchmarks/results/clone.txt
set -e
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
from=$(cd "$(dirname "$0")/.." && pwd)

seconds() { date +%s; }
part() { # part NAME COMMAND...: runs it, keeps its output aside, and prints how long it took
  name=$1; shift
  begin=$(seconds)
  "$@" > "$folder/$name.log" 2>&1 || { tail -50 "$folder/$name.log"; echo "$name failed"; exit 1; }
  taken=$(($(seconds) - begin))
  printf '%-44s %3d:%02d\n' "$name" $((taken / 60)) $((taken % 60))
}

echo "# $(nproc) cores, $(date +%Y-%m-%d), $(git -C "$from" rev-parse --short HEAD)"
part clone git clone --quiet "$from" "$folder/clone"
cd "$folder/clone"
export XDG_CACHE_HOME="$folder/cache" PIP_CACHE_DIR="$folder/pip"
echo "## make demo"
part install make .venv/demo-installed
part demo make demo
grep -v '^  *[0-9]* ' "$folder/demo.log" | tail -22 | cut -c1-150 | sed 's/^/    /'
echo "## make test"
part install-for-tests make setup
part lint-and-types make lint types
part warmup .venv/bin/deltawire warmup
part check make check
tail -1 "$folder/check.log" | sed 's/^/    /'
part test make test PYTEST_ADDOPTS=--durations=12
tail -14 "$folder/test.log" | cut -c1-150 | sed 's/^/    /'
echo "## make test-all"
part test-all make test-all PYTEST_ADDOPTS=--durations=12
grep -E 'passed|failed' "$folder/test-all.log" | sed 's/^/    /'
