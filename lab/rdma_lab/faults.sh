# Changes and shows the faults of the lab's fabric; run as root in the guest by faults.py:
#   faults.sh FABRIC PORTS show
#   faults.sh FABRIC PORTS cable NAME in|out
#   faults.sh FABRIC PORTS port NAME up|down
#   faults.sh FABRIC PORTS device NAME present|absent
#   faults.sh FABRIC PORTS loss NAME K/N PERCENT  loses K of N messages that arrive at NAME; 0/1 0: none
#   faults.sh FABRIC PORTS sm stop|start|restart|failover
# NAME is a port: rxeN, softibN, switchS/P. Each change is waited for; what went wrong is the last line, with status 1.
#
# `show` prints a line for each cable, "port NAME CABLE STATE DEVICE [OTHER-END]", for each lossy port, "loss NAME K/N", and
# for each OpenSM, "sm HCA STATE".

fabric=$1 ports=$2 what=$3 name=$4 how=$5
debug=/sys/kernel/debug/softib

fail() {
    echo "$*"
    exit 1
}

within() { # SECONDS COMMAND...: waits until the command succeeds
    tries=$(($1 * 10))
    shift
    until "$@"; do
        tries=$((tries - 1))
        [ "$tries" -gt 0 ] || return 1
        sleep 0.1
    done
}

state_of() { # DEVICE: "ACTIVE", "DOWN", ..., "disabled"; "-" without the device
    port=/sys/class/infiniband/$1/ports/1
    state=- phys=
    [ ! -d "$port" ] || { read -r state <"$port/state" && read -r phys <"$port/phys_state"; } 2>/dev/null
    state=${state#*: }
    [ "${phys%%:*}" != 3 ] || [ "$fabric" = roce ] || state=disabled # RoCE says so of each port that is down
    echo "$state"
}

is_up() { # NETDEV
    read -r flags <"/sys/class/net/$1/flags"
    [ $((flags & 1)) = 1 ]
}

is_present() { [ -d "/sys/class/infiniband/$1" ]; }
is_absent() { ! is_present "$1"; }

leaves() { # DEVICE: waits for it, but not for the programs that have it open
    within 10 is_absent "$1" || echo "$1 is absent when every program that has it open has closed it"
}

# Soft-RoCE: device rxeN on eN, whose cable is the veth pair to the bridge's port pN.

roce_show() {
    for i in $(seq "$ports"); do
        is_up "p$i" && cable=in || cable=out
        is_present "rxe$i" && device=present || device=absent
        is_up "e$i" && state=$(state_of "rxe$i") || state=disabled
        echo "port rxe$i $cable $state $device"
    done
    # "qdisc netem 8001: dev p2 root refcnt 2 limit 1000 loss 10%"
    tc qdisc show | sed -n 's|^qdisc netem .* dev p\([0-9]*\) .* loss \([0-9.]*\)%.*|loss rxe\1 \2/100|p'
}

roce_cable() { # down: the bridge's port, so that eN loses its carrier
    [ "$how" = in ] && to=up || to=down
    ip link set "p$number" "$to"
}

roce_port() {
    ip link set "e$number" "$how" && if [ "$how" = up ]; then
        ip addr replace "fd77::$number/64" dev "e$number" nodad # the kernel forgets it when the interface goes down
    fi
}

roce_device() {
    if [ "$how" = present ]; then
        rdma link add "$name" type rxe netdev "e$number"
    else
        rdma link del "$name" >/dev/null 2>&1 &
        leaves "$name"
    fi
}

roce_loss() {
    if [ "$1" = 0 ]; then
        tc qdisc del dev "p$number" root
    else
        tc qdisc replace dev "p$number" root netem loss "$1%"
    fi
}

# InfiniBand: files of the module softib (softib/debug.c).

infiniband_show() {
    while read -r there there_state here here_state cable; do
        device=present state=$here_state
        case $here in softib*) state=$(state_of "$here") ;; *) device=- ;; esac
        echo "port $here $cable $state $device $there"
    done <$debug/links
    while read -r hca is; do
        [ "$is" = here ] || echo "port $hca - - absent"
    done <$debug/hcas
    while read -r port _ lost; do echo "loss $port $lost"; done <$debug/drop
    for pid in $(pidof opensm); do
        hca=$(sm_hca "$pid")
        echo "sm $hca $(sm_state "$pid")"
    done
}

infiniband_cable() { echo "$name $how" >$debug/links; }
infiniband_port() { echo "$name $how" >$debug/links; }
infiniband_loss() { echo "$name $how" >$debug/drop; }

has_interface() { ls "/sys/class/infiniband/$1/device/net" 2>/dev/null | grep -q .; }

infiniband_device() {
    if [ "$how" = absent ]; then
        echo "$name remove" 2>/dev/null >$debug/hcas &
        leaves "$name"
        return
    fi
    echo "$name add" >$debug/hcas || return
    within 10 has_interface "$name" || fail "$name gets no IPoIB interface"
    interface=$(ls "/sys/class/infiniband/$name/device/net") # as infiniband.sh makes it:
    [ "$interface" = "ib$number" ] || ip link set "$interface" name "ib$number" || return
    ip addr replace "10.77.0.$number/24" dev "ib$number"
    ip addr replace "fd77::$number/64" dev "ib$number" nodad
    ip link set "ib$number" up
}

# OpenSM on softibN has the log opensm.log for the first HCA, or else opensm.softibN.log.

guid_of() { printf '0x52540000000100%x1' $((${1#softib} - 1)); }
log_of() { if [ "$1" = softib1 ]; then echo /var/log/opensm.log; else echo "/var/log/opensm.$1.log"; fi; }

sm_hca() { # PID
    guid=$(tr '\0' '\n' <"/proc/$1/cmdline" | grep '^0x52540000000100.*1$')
    i=${guid#0x52540000000100}
    echo "softib$((0x0${i%1} + 1))"
}

sm_state() { # PID: "MASTER", "STANDBY", "DISCOVERING"
    state=$(grep -o 'Entering [A-Z]* state' "$(log_of "$(sm_hca "$1")")" | tail -n 1)
    state=${state#Entering }
    echo "${state% state}" | grep . || echo DISCOVERING
}

sm_in() { # STATE: the OpenSM's process that is in it, if there is one
    for pid in $(pidof opensm); do
        [ "$(sm_state "$pid")" != "$1" ] || echo "$pid"
    done | grep .
}

is_master() { [ "$(sm_hca "$(sm_in MASTER)")" = "$1" ]; }
has_ended() { [ ! -d "/proc/$1" ]; }
stands_by() { sm_in STANDBY >/dev/null; }

sm_start() { # HCA OPTION...
    on=$1 log=$(log_of "$1")
    shift
    opensm -B -e -f "$log" -g "$(guid_of "$on")" "$@" >/dev/null 2>&1 || fail "OpenSM cannot be started on $on"
}

sm_stop() {
    for pid in $(pidof opensm); do
        kill "$pid"
        within 10 has_ended "$pid" || kill -KILL "$pid"
        within 5 has_ended "$pid" || fail "OpenSM does not end"
    done
}

sm_failover() { # the standby, on another HCA, asks the master four times a second whether it lives
    master=$(sm_in MASTER) || fail "no OpenSM is the master: rdma-lab break --undo sm"
    [ "$(sm_hca "$master")" = softib1 ] && standby=softib2 || standby=softib1
    if ! stands_by; then
        [ "$(state_of "$standby")" = ACTIVE ] || fail "a standby needs $standby, whose port is not active"
        printf '%s\n' "sminfo_polling_timeout 250" "polling_retry_number 2" >/run/standby.conf
        sm_start "$standby" -F /run/standby.conf
        within 20 stands_by || fail "OpenSM on $standby does not stand by"
    fi
    kill -KILL "$master"
    within 15 is_master "$standby" || fail "OpenSM on $standby does not become the master"
}

infiniband_sm() {
    case $name in
    stop) sm_stop ;;
    start) pidof opensm >/dev/null || { sm_start softib1 && within 20 is_master softib1 || fail "OpenSM is no master"; } ;;
    restart)
        on=$(sm_hca "$(sm_in MASTER || fail "no OpenSM is the master: rdma-lab break --undo sm")")
        sm_stop
        sm_start "$on"
        within 20 is_master "$on" || fail "OpenSM on $on does not become the master"
        ;;
    failover) sm_failover ;;
    esac
}

number=${name#rxe}
number=${number#softib}
"${fabric}_$what" "$6" || exit 1
