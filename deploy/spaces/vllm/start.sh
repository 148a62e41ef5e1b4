#!/bin/bash
# Starts the proxy, vLLM and the agent, and exits when one of them does.
#   STORE_URL   the store that holds the run
#   API_TOKEN   the bearer token that clients must send
#   MODEL_NAME, MIRROR, VLLM_ARGS   optional
set -euo pipefail
: "${STORE_URL:?must be the URL of the store that holds the run}"
mirror=${MIRROR:-/tmp/mirror}
cd "$(dirname "$0")"

# The processes that were started end with this script.
trap 'kill $(jobs -p) 2>/dev/null || true; wait' EXIT
trap 'exit 143' TERM
trap 'exit 130' INT

bash proxy.sh &

# The run begins when the trainer publishes its first version.
until deltawire pull "$STORE_URL" --to "$mirror" --quiet; do
  echo "no version to start from yet; looking again in 10 seconds" >&2
  sleep 10 &
  wait $!
done

# vLLM gets neither API_TOKEN nor the credentials of the store: it does not need them. The agent changes weights
# with a token that both read from a file owned by this user.
# shellcheck disable=SC2086  # VLLM_ARGS holds several options
env --unset=API_TOKEN --unset=HF_TOKEN --unset=AWS_ACCESS_KEY_ID --unset=AWS_SECRET_ACCESS_KEY \
  --unset=AWS_SESSION_TOKEN --unset=DELTAWIRE_TOKEN \
  vllm serve "$mirror" --served-model-name "${MODEL_NAME:-policy}" --host 127.0.0.1 --port 8000 \
  --weight-transfer-config '{"backend": "deltawire"}' \
  --worker-extension-cls deltawire.engines.vllm.worker.WorkerExtension \
  --middleware deltawire.engines.vllm.route.Route ${VLLM_ARGS:-} &

deltawire attach --engine vllm --url http://127.0.0.1:8000 --from "$STORE_URL" --mirror "$mirror" --listen 9100 &

wait -n
