# Makes an InfiniBand subnet in the lab's guest, and waits until every port can be used. PORTS and SWITCHES are set;
# softib.ko is in /run/rdma-lab, and no_send_only.so, which makes OpenSM know no send-only members (driver.py). What goes
# wrong is its last line, and its status is not 0.
#
# HCA softibN, of one port, has the IPoIB interface ibN with 10.77.0.N and fd77::N. OpenSM runs on softib1.

fail() {
    echo "$*"
    exit 1
}

mount -t debugfs debugfs /sys/kernel/debug
modprobe -a rdmavt ib_umad ib_ipoib rdma_ucm || fail "the kernel's InfiniBand modules cannot be loaded"
ln -s /run/rdma-lab/no_send_only.so /run/no_send_only.so
insmod /run/rdma-lab/softib.ko hcas="$PORTS" switches="$SWITCHES" || fail "the module softib cannot be loaded"
opensm -B -g 0x5254000000010001 >/dev/null 2>&1 || fail "OpenSM cannot be started"
# The kernel counts interfaces from 0. From the last on, so that each new name is free.
{
    for i in $(seq "$PORTS" -1 1); do echo "link set ib$((i - 1)) name ib$i"; done
    for i in $(seq "$PORTS"); do
        echo "addr add 10.77.0.$i/24 dev ib$i"
        echo "addr add fd77::$i/64 dev ib$i nodad"
        echo "link set ib$i up"
    done
} | ip -batch - || fail "the IPoIB interfaces cannot be set up"

until [ "$(cat /sys/class/infiniband/softib*/ports/1/state | grep -c ACTIVE)" = "$PORTS" ] &&
    [ "$(cat /sys/class/net/ib[0-9]*/carrier 2>/dev/null | grep -c 1)" = "$PORTS" ]; do
    pidof opensm >/dev/null || fail "OpenSM ended: $(tail -n 1 /var/log/opensm.log)"
    sleep 0.1
done
