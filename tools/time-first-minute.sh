#!/bin/sh
# How long it takes from a bare Python to an understanding: a new environment, `pip install`, `deltawire hello`, and the page of
# `deltawire explain`. Everything is downloaded and compiled: tools/time-first-minute.sh > benchmarks/results/first_minute.txt
set -e
limit=90
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
from=$(cd "$(dirname "$0")/.." && pwd)
export PIP_CACHE_DIR="$folder/pip" XDG_CACHE_HOME="$folder/cache" PIP_DISABLE_PIP_VERSION_CHECK=1
unset PYTHONPATH NUMBA_CACHE_DIR

tenths() { echo $(($(date +%s%N) / 100000000)); }
shown() { printf '%-28s %3d.%d s\n' "$1" $(($2 / 10)) $(($2 % 10)); }
part() { # part NAME COMMAND...: runs it, keeps its output aside, and prints how long it took
  name=$1; shift
  begin=$(tenths)
  "$@" > "$folder/log" 2>&1 || { cat "$folder/log"; echo "$name failed"; exit 1; }
  shown "$name" $(($(tenths) - begin))
}
page() { # what a browser would fetch
  "$folder/venv/bin/deltawire" explain > "$folder/address" &
  server=$!
  while [ ! -s "$folder/address" ]; do kill -0 $server && sleep 0.1 || return 1; done
  "$folder/venv/bin/python" -c 'import sys, urllib.request
text = urllib.request.urlopen(sys.argv[1]).read()
assert text.rstrip().endswith(b"</html>"), text[-200:]
print(len(text), "bytes of HTML")' "$(cat "$folder/address")" || { kill $server; return 1; }
  kill $server
  wait $server || true
}

# In the place of a registry, and so not counted.
"${PYTHON:-python3}" -m pip wheel --quiet --no-deps --wheel-dir "$folder/wheels" "$from"
wheel=$(echo "$folder"/wheels/*.whl)
echo "# $(nproc) cores, $("${PYTHON:-python3}" --version), $(date +%Y-%m-%d), $(git -C "$from" rev-parse --short HEAD)"
echo "# $(basename "$wheel"), with its dependencies alone; pip's cache was empty"
started=$(tenths)
part "python -m venv" "${PYTHON:-python3}" -m venv "$folder/venv"
part "pip install" "$folder/venv/bin/pip" install "$wheel"
part "deltawire hello" "$folder/venv/bin/deltawire" hello
grep '^equal weights' "$folder/log" | sed 's/^/    /'
part "deltawire explain" page
tail -1 "$folder/log" | sed 's/^/    /'
taken=$(($(tenths) - started))
shown "all of it, limit $limit s" $taken
test $taken -lt $((limit * 10))
