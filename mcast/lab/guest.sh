# PID 1 of the lab's guest: makes the fabric, runs the command, says how it ended, stops the machine.
#
# A static busybox from the host runs this; its root is the host's filesystem, read-only over 9p.
#   $1  path of that busybox
# The host shares a directory, mounted on /run/mcast, with these files:
#   settings  PORTS=, MODULES_DIR=, TTY=       modules  paths to insmod, in order
#   shares    directories to share, one a line  command  a script that becomes the command
#   fabric    where it is there, a script for the copy-on-write view that makes another fabric
# and listens on the virtio ports mcast.ctl (lines: ready | exit N | fail WHY), mcast.out, mcast.err.

"$1" mount -t proc proc /proc # by its full path: without /proc, busybox cannot find itself
export PATH=/usr/sbin:/usr/bin:/sbin:/bin
echo localhost >/proc/sys/kernel/hostname # without a name, MPI launchers refuse the host
mount -t sysfs sys /sys
mount -t devtmpfs dev /dev
mount -t tmpfs run /run
mkdir -p /dev/pts /dev/shm /run/mcast /run/host /run/upper /run/root
mount -t devpts -o ptmxmode=666 devpts /dev/pts
mount -t tmpfs shm /dev/shm
ln -sf /proc/self/fd /dev/fd
ln -sf /proc/self/fd/0 /dev/stdin
ln -sf /proc/self/fd/1 /dev/stdout
ln -sf /proc/self/fd/2 /dev/stderr

stop() { # everything the guest wrote elsewhere than in a share lives in memory
    sync
    echo b >/proc/sysrq-trigger
    sleep 60
}

fail() {
    echo "fail $*" >&3
    stop
}

port() { # the device file of the virtio port named $1; the driver finds its ports a moment after it loads
    for _ in 1 2 3 4 5 6 7 8 9 10; do
        for name in /sys/class/virtio-ports/*/name; do
            if [ "$(cat "$name")" = "$1" ]; then
                name=${name%/name}
                echo "/dev/${name##*/}"
                return
            fi
        done
        sleep 0.2
    done
    echo "/dev/null"
}

share() { # tag, directory, options
    mount -t 9p -o "trans=virtio,version=9p2000.L,msize=512000,$3" "$1" "$2"
}

host() { # one of the host's programs in the copy-on-write view; by its name alone, busybox would run its own
    chroot /run/root /usr/bin/env "$@"
}

exec 3>"$(port mcast.ctl)"
share mcast.job /run/mcast ro || fail "the job directory cannot be mounted"
. /run/mcast/settings

# The host's files again, cached this time, under a layer in memory.
while read -r module; do
    insmod "$module" || fail "the module $module cannot be loaded"
done </run/mcast/modules
share mcast.root /run/host ro,cache=loose || fail "the host's files cannot be mounted"
mount -t tmpfs -o size=75% upper /run/upper
mkdir /run/upper/files /run/upper/work
mount -t overlay -o lowerdir=/run/host,upperdir=/run/upper/files,workdir=/run/upper/work root /run/root ||
    fail "the copy-on-write view cannot be mounted"

# Modules that the kernel asks for by itself come from where the kernel came from.
release=$(uname -r)
if [ ! -d "/lib/modules/$release" ] && mkdir -p /run/root/lib/modules; then
    ln -s "$MODULES_DIR" "/run/root/lib/modules/$release"
    mount --bind /run/root/lib/modules /lib/modules
fi

for dir in proc sys dev; do mount --rbind "/$dir" "/run/root/$dir"; done
mount -t tmpfs run /run/root/run
mkdir /run/root/run/mcast
mount --bind /run/mcast /run/root/run/mcast
count=0
while IFS= read -r dir; do
    mkdir -p "/run/root$dir"
    share "mcast.share$count" "/run/root$dir" cache=mmap || fail "$dir cannot be shared"
    count=$((count + 1))
done </run/mcast/shares

# The fabric (K-FABRIC-2). The bridge floods every group for one query response
# interval after it becomes querier, so that interval is short until then. After a leave it asks twice whether
# another member is left, and waits for answers: 0.1 s each time, not a second.
cd /proc/sys/net || fail "no network in this kernel"
echo 0 >ipv6/conf/default/accept_dad
host ip -batch - <<-END || fail "the bridge cannot be made"
	link set lo up
	link add br0 type bridge mcast_snooping 1 mcast_query_response_interval 1 mcast_last_member_interval 10
	link set br0 up
	link set br0 type bridge mcast_querier 1
	link set br0 type bridge mcast_query_response_interval 1000
END
for i in $(seq "$PORTS"); do
    echo "link add e$i type veth peer name p$i"
    echo "link set p$i master br0 up"
    echo "addr add 10.77.0.$i/24 dev e$i"
    echo "addr add fd77::$i/64 dev e$i nodad"
    echo "link set e$i up"
done | host ip -batch - || fail "the ports cannot be made"
for conf in ipv4/conf/all ipv4/conf/e[0-9]*; do # senders are local addresses: without these, nothing arrives
    echo 1 >"$conf/accept_local"
    echo 0 >"$conf/rp_filter"
done
for i in $(seq "$PORTS"); do echo "link add rxe$i type rxe netdev e$i"; done |
    host rdma -b - || fail "the Soft-RoCE devices cannot be made"
cd /

if [ -e /run/mcast/fabric ]; then
    why=$(host /bin/sh /run/mcast/fabric 2>&1) || fail "${why##*
}"
fi
echo ready >&3
if [ -n "$TTY" ]; then
    host setsid -c /bin/sh /run/mcast/command <>/dev/ttyS0 >&0 2>&0 3>&-
else
    out=$(port mcast.out) err=$(port mcast.err)
    host /bin/sh /run/mcast/command </dev/null >"$out" 2>"$err" 3>&-
fi
echo "exit $?" >&3
stop
