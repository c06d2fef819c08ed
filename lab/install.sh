#!/bin/sh
# Install rdma-lab for a CI job; action.yml and Containerfile run this.
set -eu

help="usage: install.sh VENV [roce|infiniband]

Install the rdma-lab of this folder into the virtual environment VENV, and by
apt the packages that one fabric needs, or, without a fabric, both of them.
If it is run again, it installs what is missing. It needs Debian 12 or 13, and
root or sudo."
refuse() {
    echo "rdma-lab: install.sh: $1: $0 VENV [roce|infiniband]" >&2
    exit 2
}
case ${1:-} in
-h | --help) echo "$help" && exit 0 ;;
"") refuse "name the folder to install into" ;;
-*) refuse "$1 is not a folder" ;;
esac
case ${2:-} in
"" | roce | infiniband) ;;
*) refuse "$2 is not a fabric" ;;
esac
[ $# -le 2 ] || refuse "$3 is one word too many"
venv=$1 fabric=${2:-}
here=$(cd "$(dirname "$0")" && pwd)
export DEBIAN_FRONTEND=noninteractive PIP_DISABLE_PIP_VERSION_CHECK=1
as_root() { if [ "$(id -u)" = 0 ]; then "$@"; else sudo "$@"; fi; }

fail() {
    echo "rdma-lab: $1 failed: the lab needs Debian 12 or 13, or a container of it, such as debian:12" >&2
    exit 1
}

if ! python3 -c 'import ensurepip, venv' 2>/dev/null; then
    as_root apt-get update -q || fail "apt-get update"
    as_root apt-get install -qy --no-install-recommends python3-venv ca-certificates || fail "apt-get install"
fi
if [ ! -x "$venv/bin/rdma-lab" ]; then
    python3 -m venv "$venv"
    "$venv/bin/pip" install -q "$here"
fi

status=0
"$venv/bin/rdma-lab" check ${fabric:+--fabric "$fabric"} --json >"$venv/check.json" || status=$?
[ "$status" -le 1 ] || exit "$status" # 1: something is missing
line=$("$venv/bin/python" -c 'import json, sys; print(json.load(open(sys.argv[1]))["fix"])' "$venv/check.json")
if [ -n "$line" ]; then
    as_root apt-get update -q || fail "apt-get update"
    sh -c "$line" || fail "$line"
fi
