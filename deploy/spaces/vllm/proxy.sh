#!/bin/bash
# Runs nginx with nginx.conf, letting through who sends API_TOKEN.
set -euo pipefail
# The token becomes part of a regular expression: plain strings are compared without regard to case there.
if [[ ! ${API_TOKEN:-} =~ ^[A-Za-z0-9_-]{16,200}$ ]]; then
  echo "API_TOKEN is to be 16 to 200 characters out of A-Z a-z 0-9 _ -" >&2
  exit 2
fi
umask 077
folder=$(mktemp -d)
cp "$(dirname "$0")/nginx.conf" "$folder/nginx.conf"
# shellcheck disable=SC2016  # the names are for nginx
printf 'map $http_authorization $known { default 0; "~^Bearer %s$" 1; }\n' "$API_TOKEN" > "$folder/token.conf"
unset API_TOKEN
exec nginx -p "$folder" -c nginx.conf
