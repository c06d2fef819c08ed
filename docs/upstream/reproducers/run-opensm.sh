#!/bin/bash -eu
# Runs opensm.c against the OpenSM of this machine, on a fabric of ibsim with two hosts; no root is needed.
# Needs opensm, ibsim-utils, libibumad-dev and a C compiler. OPENSM=PATH runs another opensm, a patched one, say.
here=$(realpath "$(dirname "$0")")
work=$(mktemp -d)
cd "$work"
trap 'exec 2>/dev/null; kill -KILL $(jobs -p); rm -rf "$work"' EXIT
PATH=$PATH:/usr/sbin
opensm=${OPENSM:-opensm}
preload=$(find /usr/lib* -name libumad2sim.so | head -1)
export IBSIM_SOCKNAME=mcast-upstream-$$ OSM_TMP_DIR=$work OSM_CACHE_DIR=$work

cc -o opensm-cases "$here/opensm.c" -libumad
cat >net <<'END'
Switch	4 "S1"
[1]	"HSM"[1]
[2]	"H1"[1]

caguid=0x10
Hca	1 "HSM"
[1]	"S1"[1]

caguid=0x20
Hca	1 "H1"
[1]	"S1"[2]
END
echo force_log_flush TRUE >options
mkfifo console
ibsim -s net <console >ibsim.out 2>&1 &
exec 3>console
until grep -q "@$IBSIM_SOCKNAME:ctl" /proc/net/unix; do sleep 0.05; done
SIM_HOST=HSM LD_PRELOAD=$preload "$opensm" -e -F options -f osm.log >opensm.out 2>&1 &
until grep -q "SUBNET UP" osm.log 2>/dev/null; do sleep 0.05; done
"$opensm" --version | grep -o 'OpenSM [0-9.]*' | head -1
SIM_HOST=H1 LD_PRELOAD=$preload ./opensm-cases 1 0x21 2>/dev/null
