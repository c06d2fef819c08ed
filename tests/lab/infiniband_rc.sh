# Runs programs that need reliable connections on the lab's InfiniBand fabric of two HCAs and one switch. What each
# says is kept in the directory $1 as NAME.out, its exit status as NAME.status.
cd "$1" || exit 1
debug=/sys/kernel/debug/softib
guid=0x5254000000010011 # softib2

kept() { # name, command
    kept=$1
    shift
    "$@" >"$kept.out" 2>&1
    echo $? >"$kept.status"
    echo "$kept"
}

listens() { until ss -Hltn "sport = :$1" | grep -q .; do sleep 0.05; done; }

pair() { # name, TCP port of the server, command: the server is on softib1
    name=$1 port=$2
    shift 2
    (kept "$name.server" "$@" -d softib1) &
    listens "$port"
    kept "$name.client" "$@" -d softib2 127.0.0.1
    wait $!
}

packets() { perfquery -x -G "$guid" 1 | sed -n 's/^PortUnicastXmitPkts:\.*//p'; }

kept devinfo ibv_devinfo -v -d softib1
for size in 1 2048 5000 1000000; do
    packets >"before.$size"
    pair "pingpong.$size" 18515 ibv_rc_pingpong -c -s "$size" -n 50
    packets >"after.$size"
done
pair events 18515 ibv_rc_pingpong -c -e -n 50
pair srq 18515 ibv_srq_pingpong -c -n 50
pair uc 18515 ibv_uc_pingpong -n 50 & # the client's post is refused; the server waits, and is stopped
both=$!
until [ -e uc.client.status ]; do sleep 0.05; done
kill $(pidof ibv_uc_pingpong)
wait "$both"
(kept rping.server rping -s -a 10.77.0.1 -C 10 -v -V -S 5000) &
server=$!
until [ "$(cat rping.client.status)" = 0 ]; do # refused until the server listens
    kept rping.client rping -c -a 10.77.0.1 -I 10.77.0.2 -C 10 -V -S 5000
done 2>/dev/null
wait "$server"
for test in send_bw write_bw read_bw atomic_bw send_lat write_lat read_lat; do
    pair "$test" 18515 "ib_$test" -F -n 50
done
# Each end sleeps until there is an event of one of its two completion queues. One of these has room for one.
pair send_lat_events 18515 ib_send_lat -e -F -n 300
pair ud_lat_events 18515 ib_send_lat -c UD -e -F -n 300

# A second partition, and requests that end in errors.
mkdir -p /etc/opensm
printf '%s\n' 'Default=0x7fff, ipoib: ALL=full;' 'second=0x0001: ALL=full;' >/etc/opensm/partitions.conf
kill -HUP "$(pidof opensm)"
until [ "$(cat /sys/class/infiniband/softib[12]/ports/1/pkeys/1 | sort -u)" = 0x8001 ]; do sleep 0.05; done
kept errors ./rc_errors

# Every seventh packet that arrives at either port is lost, and is sent again.
cat "$debug/tap" >lossy.pcapng &
tap=$!
until [ -s lossy.pcapng ]; do sleep 0.05; done
for one in 1 2; do echo "softib$one 7" >"$debug/drop"; done
pair lossy 18515 ibv_rc_pingpong -c -s 5000 -n 10
for one in 1 2; do echo "softib$one 0" >"$debug/drop"; done
kill "$tap"

# A cable is taken out in the middle. The side that waits for a message learns nothing, and is stopped.
packets >before.cut
pair cut 18515 ibv_rc_pingpong -n 100000000 &
both=$!
until [ "$(packets)" -gt "$(($(cat before.cut) + 1000))" ]; do sleep 0.05; done
echo "softib2 out" >"$debug/links"
until [ -e cut.server.status ] || [ -e cut.client.status ]; do sleep 0.05; done
kill $(pidof ibv_rc_pingpong)
wait "$both"
echo "softib2 in" >"$debug/links"
until [ "$(cut -d: -f1 /sys/class/infiniband/softib2/ports/1/state)" = 4 ]; do sleep 0.05; done
pair mended 18515 ibv_rc_pingpong -c -n 50
kept log dmesg
