#!/usr/bin/env bash
# Unpacks Debian's Prometheus into DIRECTORY, without installing anything, and prints the paths as shell assignments:
#   eval "$(.ci/prometheus.sh DIRECTORY)"     sets KVOFFLOAD_PROMETHEUS and KVOFFLOAD_PROMTOOL
# A prometheus and promtool that are on the PATH are used as they are. Fails, with a reason, where there is neither.
set -euo pipefail
[ $# = 1 ] || { echo "usage: $0 DIRECTORY" >&2; exit 2; }
into=$1

print_paths() { printf 'export KVOFFLOAD_PROMETHEUS=%q KVOFFLOAD_PROMTOOL=%q\n' "$1" "$2"; }

if command -v prometheus >/dev/null && command -v promtool >/dev/null; then
  print_paths "$(command -v prometheus)" "$(command -v promtool)"
  exit 0
fi
if [ ! -x "$into/usr/bin/promtool" ]; then
  command -v apt-get >/dev/null || { echo "no prometheus on the PATH, and no apt-get to fetch it" >&2; exit 1; }
  mkdir -p "$into"
  into=$(cd "$into" && pwd)
  cd "$into"
  apt-get -qq download prometheus >&2 || { apt-get -qq update >&2 && apt-get -qq download prometheus >&2; }
  dpkg -x ./prometheus_*.deb .
  rm ./prometheus_*.deb
fi
into=$(cd "$into" && pwd)
"$into/usr/bin/promtool" --version >/dev/null
print_paths "$into/usr/bin/prometheus" "$into/usr/bin/promtool"
