#!/bin/bash
# Runs nginx with nginx.conf: forwards requests with API_TOKEN, and nudges to the agent with DELTAWIRE_TOKEN, if set.
set -euo pipefail
# Tokens become part of a regular expression, because nginx compares plain strings case-insensitively.
for name in API_TOKEN DELTAWIRE_TOKEN; do
  if [[ ! ${!name:-} =~ ^[A-Za-z0-9_-]{16,200}$ && ($name = API_TOKEN || ${!name:-}) ]]; then
    echo "$name must be 16 to 200 characters from A-Z a-z 0-9 _ -" >&2
    exit 2
  fi
done
umask 077
folder=$(mktemp -d)
cp "$(dirname "$0")/nginx.conf" "$folder/nginx.conf"
# As a bearer token, or as the password of the user "key" in a URL, for clients that support nothing else, such as TRL.
basic=$(printf 'key:%s' "$API_TOKEN" | base64 --wrap=0 | sed 's/[+]/[+]/g')
# shellcheck disable=SC2016  # nginx expands these names
{
  printf 'map $http_authorization $known { default 0; "~^Bearer %s$" 1; "~^Basic %s$" 1; }\n' "$API_TOKEN" "$basic"
  printf 'map $http_authorization $nudges { default 0; "~^Bearer %s$" 1; }\n' "${DELTAWIRE_TOKEN:-[^ -~]}"
} > "$folder/token.conf"
unset API_TOKEN DELTAWIRE_TOKEN
exec nginx -p "$folder" -c nginx.conf
