#!/bin/sh
# PID 1 of the lab's guest: makes the fabric, waits, runs the command, says how it ended, stops the machine.
#
# Until it waits nothing is known of this run, and none of the host's files are seen: the machine may be saved
# then, and be resumed for other runs. virtme-ng's initramfs holds it, with these files added:
#   /lab/settings  PORTS=, MODULES=      /lab/modules  what to insmod      /lab/bin, /lab/lib  ip and rdma
# The host shares a directory, mounted on /run/rdma-lab, with these files:
#   settings  MODULES_DIR=, TTY=, MARK=, MAX_SCRIPT_SECONDS=    shares  directories to share, one a line    command  becomes the command
#   fabric    where it is there, a script for the copy-on-write view that makes another fabric
# and uses the virtio ports lab.out, lab.err, and lab.ctl:
#   from here  standing [keep] | ready | exit N | fail WHY
# and lab.go, where the host says once "go SECONDS" or "wake SECONDS", and from then on "ID SCRIPT", each of which
# serve answers with "ID BASE64" there; and lab.tap, where capture.py writes packets (see control.py for both).

/bin/busybox --install -s /bin
export PATH=/bin
mkdir -p /proc /sys /dev /run
mount -t proc proc /proc
echo localhost >/proc/sys/kernel/hostname # without a name, MPI launchers refuse the host
echo >/proc/sys/kernel/modprobe           # no host, no modules of the host
mount -t sysfs sys /sys
mount -t devtmpfs dev /dev
mount -t tmpfs run /run
mkdir -p /dev/pts /dev/shm /run/rdma-lab /run/host /run/upper /run/root
mount -t devpts -o ptmxmode=666 devpts /dev/pts
mount -t tmpfs shm /dev/shm
ln -sf /proc/self/fd /dev/fd
ln -sf /proc/self/fd/0 /dev/stdin
ln -sf /proc/self/fd/1 /dev/stdout
ln -sf /proc/self/fd/2 /dev/stderr

repair_clock() { # where the kernel has taken the processor's counter for several times as slow, on a busy host
    rtc=$(cat /sys/class/rtc/rtc0/since_epoch 2>/dev/null) || return # both began with the same second
    ahead=$(($(date +%s) - rtc))
    if [ "$ahead" -ge 3 ]; then
        echo "lab: the clock is $ahead s ahead of the RTC since the boot: it is the HPET's from now on" >/dev/kmsg
        echo hpet >/sys/devices/system/clocksource/clocksource0/current_clocksource
    fi
}

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

serve() { # runs what other processes of the host's user ask for: rdma-lab break, rdma-lab tap
    while read -r id script; do
        answer=$({
            timeout -s KILL "$MAX_SCRIPT_SECONDS" chroot /run/root /usr/bin/env /bin/sh -c "$script" 2>&1 </dev/null 4>&-
            printf '\n%d\n' $?
        } | base64 -w 0)
        echo "$id $answer" >&4
    done <&4
}

ours() { # one of the tools that came along
    LD_LIBRARY_PATH=/lab/lib "/lab/bin/$1" "$2" "$3"
}

. /modules/load_all.sh
. /lab/settings
exec 3>"$(port lab.ctl)" 4<>"$(port lab.go)" # for good: a port that is closed forgets what the host has written
for module in $MODULES; do
    insmod "$module" || fail "the module $module cannot be loaded"
done

# The fabric (K-FABRIC-2). The bridge floods every group for one query response
# interval after it becomes querier, so that interval is short until then. After a leave it asks twice whether
# another member is left, and waits for answers: 0.1 s each time, not a second.
cd /proc/sys/net || fail "no network in this kernel"
echo 0 >ipv6/conf/default/accept_dad
ours ip -batch - <<-END || fail "the bridge cannot be made"
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
done | ours ip -batch - || fail "the ports cannot be made"
for conf in ipv4/conf/all ipv4/conf/e[0-9]*; do # senders are local addresses: without these, nothing arrives
    echo 1 >"$conf/accept_local"
    echo 0 >"$conf/rp_filter"
done
for i in $(seq "$PORTS"); do echo "link add rxe$i type rxe netdev e$i"; done |
    ours rdma -b - || fail "the Soft-RoCE devices cannot be made"
cd /

repair_clock

# A machine may be kept if those that are resumed from it draw other random numbers, which the kernel sees to
# when its generation ID changes.
head -c 1 /dev/random >/dev/null
set -- /sys/bus/*/drivers/vmgenid/*:00
if [ -d "$1" ]; then echo "standing keep" >&3; else echo standing >&3; fi

read -r how now <&4
date -s "@$now" >/dev/null || fail "the clock cannot be set"
tries=0
while [ "$how" = wake ] && ! dmesg | grep -q "reseeded due to virtual machine fork"; do
    tries=$((tries + 1))
    [ "$tries" -lt 600 ] || fail "the kernel was not told that it is resumed"
    sleep 0.05
done

share lab.job /run/rdma-lab ro || fail "the job directory cannot be mounted"
. /run/rdma-lab/settings
share lab.root /run/host ro,cache=loose || fail "the host's files cannot be mounted"

# The host's files under a layer in memory.
mount -t tmpfs -o size=75% upper /run/upper
mkdir /run/upper/files /run/upper/work
mount -t overlay -o lowerdir=/run/host,upperdir=/run/upper/files,workdir=/run/upper/work root /run/root ||
    fail "the copy-on-write view cannot be mounted"

# The guest has this name. Where the host has no such file, as a new root file system has none, nobody would know it.
[ -e /run/root/etc/hosts ] || echo "127.0.0.1 localhost" >/run/root/etc/hosts

# Modules that the kernel asks for by itself come from where the kernel came from.
release=$(uname -r)
if [ ! -d "/run/root/lib/modules/$release" ] && mkdir -p /run/root/lib/modules; then
    ln -s "$MODULES_DIR" "/run/root/lib/modules/$release"
fi
printf '#!/bin/sh\nexec chroot /run/root /sbin/modprobe "$@"\n' >/lab/modprobe
chmod +x /lab/modprobe
echo /lab/modprobe >/proc/sys/kernel/modprobe

for dir in proc sys dev; do mount --rbind "/$dir" "/run/root/$dir"; done
mount -t tmpfs run /run/root/run
mkdir /run/root/run/rdma-lab
mount --bind /run/rdma-lab /run/root/run/rdma-lab
count=0
while IFS= read -r dir; do
    mkdir -p "/run/root$dir"
    share "lab.share$count" "/run/root$dir" cache=mmap || fail "$dir cannot be shared"
    count=$((count + 1))
done </run/rdma-lab/shares

export PATH=/usr/sbin:/usr/bin:/sbin:/bin
if [ -e /run/rdma-lab/fabric ]; then
    why=$(chroot /run/root /usr/bin/env /bin/sh /run/rdma-lab/fabric 2>&1) || fail "${why##*
}"
fi
mkdir -p /dev/virtio-ports # as udev names them
ln -s "$(port lab.tap)" /dev/virtio-ports/lab.tap
serve 3>&- &
echo ready >&3
if [ -n "$TTY" ]; then
    chroot /run/root /usr/bin/env setsid -c /bin/sh /run/rdma-lab/command <>/dev/ttyS0 >&0 2>&0 3>&- 4>&-
    echo "exit $?" >&3
    stop
fi
# The command writes to pipes, because a port can be opened only once, and programs open /dev/stderr anew. What is still
# in a port when the machine stops is lost: so MARK ends each output, and the host stops the machine when it has read both.
mkfifo /run/out /run/err
dd bs=64k </run/out >"$(port lab.out)" 2>/dev/null 3>&- 4>&- &
dd bs=64k </run/err >"$(port lab.err)" 2>/dev/null 3>&- 4>&- &
exec 5>/run/out 6>/run/err
chroot /run/root /usr/bin/env /bin/sh /run/rdma-lab/command </dev/null >&5 2>&6 3>&- 4>&- 5>&- 6>&-
status=$?
sync # what was written to shares
printf '\0%s' "$MARK" >&5
printf '\0%s' "$MARK" >&6
echo "exit $status" >&3
while :; do sleep 3600; done
