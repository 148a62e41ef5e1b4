#!/bin/sh
# Runs nginx with nginx.conf in front of ORIGIN, the URL that serves the runs: https://bucket.example
#   ORIGIN_QUERY           sent with each request to the origin, such as a SAS token: sv=...&sig=...
#   ORIGIN_AUTHORIZATION   sent to the origin as the header Authorization: Bearer ...
#   CACHE_FOLDER, CACHE_SIZE, CA_FILE, RESOLVER
set -eu
folder=$(mktemp -d)
cache=${CACHE_FOLDER:-$folder} size=${CACHE_SIZE:-50g} ca=${CA_FILE:-/etc/ssl/certs/ca-certificates.crt}
resolver=${RESOLVER:-$(awk '/^nameserver [0-9.]+$/ { print $2; exit }' /etc/resolv.conf)}

refuse() {
  echo "$1" >&2
  exit 2
}

# These values become part of a configuration. None is printed, since some are secrets.
case ${ORIGIN:-} in
  */ | *[!A-Za-z0-9_.~:/%-]*) refuse "ORIGIN must be a URL such as https://bucket.example, without a trailing slash" ;;
  http://?* | https://?*) ;;
  *) refuse "ORIGIN must be the URL that serves the runs, such as https://bucket.example" ;;
esac
case ${ORIGIN_QUERY:-} in *[!A-Za-z0-9_.~:/%\&=+-]*) refuse "ORIGIN_QUERY must be a query without '?': a=b&c=d" ;; esac
case ${ORIGIN_AUTHORIZATION:-} in
  *[!A-Za-z0-9_.~:/%\&=+,\ -]*) refuse "ORIGIN_AUTHORIZATION must be the value of a header, without quotes" ;;
esac
case $cache$size$ca$resolver in
  *[!A-Za-z0-9_./-]*) refuse "CACHE_FOLDER, CACHE_SIZE, CA_FILE, RESOLVER: two paths, a size as 50g, an address" ;;
esac

umask 077
mkdir -p "$cache"
cp "$(dirname "$0")/nginx.conf" "$folder/nginx.conf"
cat > "$folder/origin.conf" <<END
map "" \$origin { default "$ORIGIN"; }
map "" \$origin_query { default "${ORIGIN_QUERY:+?$ORIGIN_QUERY}"; }
map "" \$origin_authorization { default "${ORIGIN_AUTHORIZATION:-}"; }
proxy_ssl_trusted_certificate $ca;
proxy_cache_path $cache/objects levels=1:2 keys_zone=objects:64m max_size=$size inactive=30d use_temp_path=off;
${resolver:+resolver $resolver;}
END
unset ORIGIN_QUERY ORIGIN_AUTHORIZATION
exec nginx -e stderr -p "$folder" -c nginx.conf
